"""Text of one's own as blocks of a model's own tokens, made once and kept."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from torch import nn

from .arch import vocabulary_of
from .configfile import parse
from .data.blocks import Blocks, write_blocks
from .data.corpora import build_corpus
from .data.hubtokenizer import save_hub_tokenizer
from .data.manifest import read_manifest
from .data.sources import open_source
from .errors import UserError
from .files import read_json, write_json
from .identity import digest
from .jobs import BlocksJob, CorpusJob
from .request import Request
from .settings import OWN_SPLIT, DataConfig

NAMED = tuple(name for name in get_args(DataConfig.model_fields["source"].annotation) if name != "text")
HELD_OUT = "held-out"  # the part of the training text that no step sees
_VALID_ROWS = 1000  # scored, at most


def prepare(request: Request, base: Path, model: nn.Module, context: int) -> dict[tuple[str, str], Blocks]:
    """Text into blocks, under `out`/data, unless they lie there; (corpus, split) -> blocks.

    Raises:
        UserError: a text cannot be read, a split is empty, or a name is taken.
    """
    tokenizer = request.out / "tokenizer"
    save_hub_tokenizer(base, tokenizer, vocab_size=vocabulary_of(model))
    trained = tuple(data_config(d, request.field, request.valid_fraction) for d in request.data)
    texts = {HELD_OUT: trained} | {name: (data_config(d, request.field, 1.0),) for name, d in request.scored}
    if len(texts) != 1 + len(request.scored):
        raise UserError(f"--score: names must differ from each other and from {HELD_OUT!r}")
    blocks = {}
    for name, data in texts.items():
        folder = _blocks_of(request.out / "data" / name, data, tokenizer, context)
        for split in ("train", "valid") if name == HELD_OUT else ("valid",):
            blocks[name, split] = Blocks.open(folder, split)
    return blocks


def data_config(text: str, field: str, valid_fraction: float) -> DataConfig:
    """The text that a name of `NAMED`, a file or a glob stands for."""
    named = text in NAMED
    raw = {
        "source": text if named else "text",
        "files": [] if named else [text],
        "field": None if named else field,
        "part": None,
        "valid_fraction": None if text in OWN_SPLIT else valid_fraction,
        "max_train_documents": None,
    }
    return parse(DataConfig, raw, f"the text {text!r}")


def _blocks_of(folder: Path, data: tuple[DataConfig, ...], tokenizer: Path, context: int) -> Path:
    corpus_job = CorpusJob(data=data)
    blocks_job = BlocksJob(context=context, block_documents=None, max_rows=_VALID_ROWS)
    identity = {
        "text": digest([corpus_job.model_dump(mode="json"), [open_source(d).details for d in data]]),
        "blocks": digest([blocks_job.model_dump(mode="json"), read_manifest(tokenizer, "tokenizer")["sha256"]]),
    }
    _once(folder, "text", identity, lambda: build_corpus(corpus_job, folder / "corpus"))
    _once(folder, "blocks", identity, lambda: write_blocks(blocks_job, folder / "corpus", tokenizer, folder / "blocks"))
    return folder / "blocks"


def _once(folder: Path, stage: str, identity: Mapping[str, str], make: Callable[[], Any]) -> None:
    """Make a stage unless the same was made before; a new text makes its blocks anew."""
    done = folder / f"{stage}.json"
    wanted = identity if stage == "blocks" else {"text": identity["text"]}
    if not done.is_file() or read_json(done) != wanted:
        done.unlink(missing_ok=True)
        make()
        write_json(done, wanted)
