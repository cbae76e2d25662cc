"""Rows that come tokenized, from the hub or a local folder of Parquet files, as blocks that are only scored."""

import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tapernorm.util.atomic_files import sha256_of, whole_file, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest

from ..config.jobs import HubRowsJob
from .blocks import manifest_of
from .hub import (
    column,
    described,
    local_rows,
    parquet_files,
    reaching,
    reading,
)
from .token_stream import DTYPES, smallest_dtype
from .tokenizers import open_tokenizer

_ROWS = 256  # rows a batch
_REMEDY = "copy its Parquet files from a machine that has one, and name their folder as rows.name"


def write_hub_rows(job: HubRowsJob, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Write the first `max_rows` rows of a data set into `out`, as the split `valid`; returns the manifest.

    Only the rows that are needed are fetched where `max_rows` says how many; memory does not grow with their number.

    Raises:
        UserError: the data set cannot be had, lacks the field or split, has no row, or a row has another length than
            `context` or an id outside the tokenizer's vocabulary. Nothing half-written is left.
    """
    coder = open_tokenizer(tokenizer)
    _, code = DTYPES[smallest_dtype(coder.vocab_size)]
    rows, details = _open(job)
    count = 0
    with whole_file(out / "manifest.json") as manifest_file, whole_file(out / "valid.bin") as path:
        with open(path, "wb") as file:
            for ids in islice(_rows(rows, job), job.max_rows):
                _require_fitting(ids, f"row {count} of {job.rows.name}", job.context, coder.vocab_size)
                array.array(code, ids).tofile(file)
                count += 1
        if count == 0:
            raise UserError(f"{job.rows.name} has no row in split {job.rows.split!r}; name another split")
        entry = {"rows": count, "documents": None, "tokens_dropped": 0, "sha256": sha256_of(path)}
        manifest = manifest_of(
            coder,
            {"valid": entry},
            context=job.context,
            block_documents=None,
            details={**details, "field": job.rows.field, "max_rows": job.max_rows},
            config_hash=digest(job),
        )
        write_json(manifest_file, manifest)
    return manifest


def _open(job: HubRowsJob) -> tuple[Any, dict[str, Any]]:
    """The data set, and what a manifest says of its origin."""
    import datasets

    wanted, streaming = job.rows, job.max_rows is not None
    if Path(wanted.name).exists():
        if wanted.revision is not None:
            raise UserError(
                f"rows.name {wanted.name} is a local folder, which has no revision: set rows.revision to null"
            )
        files = parquet_files([wanted.name])
        return local_rows(files, wanted.field, streaming=streaming), described(files)
    with reaching(wanted.name, _REMEDY):
        rows = datasets.load_dataset(wanted.name, split=wanted.split, revision=wanted.revision, streaming=streaming)
    return rows, {"hub": wanted.name, "revision": wanted.revision, "split": wanted.split}


def _rows(rows: Any, job: HubRowsJob) -> Iterator[list[int]]:
    """Every row's ids in order; a streamed data set reaches the hub only here."""
    local = Path(job.rows.name)
    guard = (
        reading(parquet_files([job.rows.name]), job.rows.field) if local.exists() else reaching(job.rows.name, _REMEDY)
    )
    with guard:
        for batch in column(rows, job.rows.field, min(_ROWS, job.max_rows or _ROWS)):
            yield from (ids or [] for ids in batch)


def _require_fitting(ids: list[int], where: str, context: int, vocab_size: int) -> None:
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise UserError(f"{where} holds no list of token ids: name their column as rows.field")
    if len(ids) != context:
        raise UserError(f"{where} has {len(ids)} tokens and gpt2.context is {context}: the two must be equal")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise UserError(
            f"{where} has ids from {min(ids)} to {max(ids)} and the tokenizer {vocab_size} entries: the rows are of "
            "another tokenizer"
        )
