"""Write rows that are already tokenized, from the hub or a folder of Parquet files, as blocks for evaluation."""

import array
from itertools import islice
from pathlib import Path
from typing import Any

from tapernorm.util.atomic_files import sha256_of, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest

from ..config.jobs import HubRowsJob
from .blocks import manifest_of
from .hub import Rows, parquet_files
from .manifest import whole_files
from .token_stream import DTYPES, smallest_dtype
from .tokenizers import open_tokenizer

_ROWS = 256  # rows per batch
_REMEDY = "copy its Parquet files from a machine that has one, and name their folder as rows.name"


def write_hub_rows(job: HubRowsJob, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Write the first `max_rows` rows of a data set into `out` as the split `valid`, and return the manifest.

    With `max_rows`, no further rows are downloaded.

    Raises:
        UserError: the data set cannot be loaded, lacks the field or split, or has no row. A row has another length
            than `context`, or ids outside the vocabulary.
    """
    coder = open_tokenizer(tokenizer)
    _, code = DTYPES[smallest_dtype(coder.vocab_size)]
    rows = _open(job)
    count = 0
    with whole_files(out, "valid.bin") as files:
        with open(files["valid.bin"], "wb") as file:
            for ids in islice(rows.column(job.rows.field, min(_ROWS, job.max_rows or _ROWS)), job.max_rows):
                _require_fitting(ids or [], f"row {count} of {job.rows.name}", job.context, coder.vocab_size)
                array.array(code, ids).tofile(file)
                count += 1
        if count == 0:
            raise UserError(f"{job.rows.name} has no row in split {job.rows.split!r}; name another split")
        sha256 = sha256_of(files["valid.bin"])
        manifest = manifest_of(
            coder,
            {"valid": {"rows": count, "documents": None, "tokens_dropped": 0, "sha256": sha256}},
            context=job.context,
            block_documents=None,
            details={**rows.details, "field": job.rows.field, "max_rows": job.max_rows},
            config_hash=digest(job),
        )
        write_json(files["manifest.json"], manifest)
    return manifest


def _open(job: HubRowsJob) -> Rows:
    wanted, streaming = job.rows, job.max_rows is not None
    if not Path(wanted.name).exists():
        return Rows.of_hub(
            wanted.name, split=wanted.split, revision=wanted.revision, remedy=_REMEDY, streaming=streaming
        )
    if wanted.revision is not None:
        raise UserError(f"rows.name {wanted.name} is a local folder, which has no revision: set rows.revision to null")
    return Rows.of_files(parquet_files([wanted.name]), wanted.field, streaming=streaming)


def _require_fitting(ids: Any, where: str, context: int, vocab_size: int) -> None:
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise UserError(f"{where} holds no list of token ids: set rows.field to their column")
    if len(ids) != context:
        raise UserError(f"{where} has {len(ids)} tokens, but gpt2.context is {context}: set gpt2.context to its length")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise UserError(
            f"{where} has ids from {min(ids)} to {max(ids)}, but the tokenizer has {vocab_size} entries: use the "
            "tokenizer that made the rows"
        )
