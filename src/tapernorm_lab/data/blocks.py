"""Blocks on disk: text as rows of one length, and the training batches drawn from them. R rows, T context, B batch.

Documents are encoded in order, each followed by an end-of-document id, and concatenated. The ids are cut into rows of
`context` tokens. The remainder of every group of `block_documents` documents is dropped; without groups, that of the
whole split. A row may span several documents.

A split on disk has the format of a token stream, row after row. A batch is a function of (seed, step).
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tapernorm.util.atomic_files import sha256_of, write_json
from tapernorm.util.errors import UserError, setting
from tapernorm.util.hashing import digest
from tapernorm.util.rng import generator

from ..config.jobs import BlocksJob
from .corpus import SPLITS
from .manifest import made_manifest, read_manifest, whole_files
from .token_stream import DTYPES, encode_split, map_ids, open_split, smallest_dtype
from .tokenizers import Coder, open_tokenizer


@dataclass(frozen=True)
class Blocks:
    """One split of a folder of blocks."""

    rows: Tensor  # (R, T) uint16 or uint32, memory-mapped
    manifest: dict[str, Any]
    split: dict[str, Any]  # the manifest's entry of this split

    @classmethod
    def open(cls, folder: Path, split: str) -> Self:
        """Memory-map one split without reading it. Raises as `open_split` and `map_ids`."""
        manifest, entry = open_split(folder, "blocks", split)
        ids = map_ids(folder / f"{split}.bin", entry["rows"] * manifest["context"], manifest["dtype"])
        return cls(ids.view(entry["rows"], manifest["context"]), manifest, entry)


def batch_of(blocks: Blocks, *, seed: int, step: int, batch: int) -> Tensor:
    """Return the training batch of a step, (B, T) int64, as a pure function of (seed, step).

    Every epoch draws a new order of all rows. A batch may hold the end of one epoch and the start of the next.
    """
    count = len(blocks.rows)
    places = [divmod(place, count) for place in range(step * batch, (step + 1) * batch)]
    chosen = [int(_order(seed, epoch, count)[position]) for epoch, position in places]
    return torch.stack([blocks.rows[row].to(torch.int64) for row in chosen])


@lru_cache(maxsize=2)  # a batch needs the orders of at most two epochs, if it is no larger than one
def _order(seed: int, epoch: int, count: int) -> Tensor:
    return torch.randperm(count, generator=generator(seed, f"blocks/{epoch}"))


def write_blocks(job: BlocksJob, corpus: Path, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Write the splits of `corpus` that have a document into `out` as blocks, and return the manifest.

    Raises:
        UserError: a split is shorter than one row, or the corpus differs from its manifest.
    """
    coder = open_tokenizer(tokenizer)
    manifest_of_corpus = read_manifest(corpus, "corpus")
    described = manifest_of_corpus["splits"]
    kept = [split for split in SPLITS if described[split]["documents"]]
    with whole_files(out, *(f"{split}.bin" for split in kept)) as files:
        splits = {split: _write(corpus, split, coder, job, files[f"{split}.bin"]) for split in kept}
        manifest = manifest_of(
            coder,
            splits,
            context=job.context,
            block_documents=job.block_documents,
            details={
                "sources": manifest_of_corpus.get("sources", []),
                "corpus_sha256": {split: described[split]["sha256"] for split in splits},
                "max_rows": job.max_rows,
            },
            config_hash=digest(job),
        )
        write_json(files["manifest.json"], manifest)
    return manifest


def manifest_of(
    coder: Coder,
    splits: dict[str, dict[str, Any]],
    *,
    context: int,
    block_documents: int | None,
    details: dict[str, Any],
    config_hash: str,
) -> dict[str, Any]:
    """Return the manifest of rows of ids that `coder` made."""
    return made_manifest(
        "blocks",
        config_hash=config_hash,
        dtype=smallest_dtype(coder.vocab_size),
        vocab_size=coder.vocab_size,
        eod=coder.eod,
        context=context,
        block_documents=block_documents,
        tokenizer_sha256=coder.manifest["sha256"],
        splits=splits,
        details=details,
    )


def _write(corpus: Path, split: str, coder: Coder, job: BlocksJob, path: Path) -> dict[str, Any]:
    """Write the rows of one split, and return its entry of the manifest."""
    counts = encode_split(corpus, split, coder, path, row=job.context, group=job.block_documents)
    tokens, dtype = counts.pop("tokens"), smallest_dtype(coder.vocab_size)
    rows = path.stat().st_size // (job.context * DTYPES[dtype][0].itemsize)
    entry = {"rows": rows, **counts, "tokens_dropped": tokens - rows * job.context}
    if rows == 0:
        raise _too_short(split, tokens, job.context, job.block_documents)
    if split == "valid" and job.max_rows is not None and job.max_rows < rows:
        ids = map_ids(path, rows * job.context, dtype).view(rows, job.context)
        drawn = torch.randperm(rows, generator=generator(0, "blocks/valid"))[: job.max_rows].sort().values
        kept = torch.stack([ids[row] for row in drawn.tolist()])
        path.write_bytes(kept.numpy().tobytes())
        entry |= {"rows": job.max_rows, "drawn_from": rows}
    return {**entry, "sha256": sha256_of(path)}


def require_a_row(split: str, tokens: int, context: int) -> None:
    """Check that a split of `tokens` tokens has a row of `context` tokens.

    Raises:
        UserError: it has none.
    """
    if tokens < context:
        raise _too_short(split, tokens, context, None)


def _too_short(split: str, tokens: int, context: int, block_documents: int | None) -> UserError:
    group = ""
    if block_documents is not None:
        group = f" in a group of {block_documents} documents ({setting('gpt2.block_documents')})"
    key = setting("gpt2.context")
    return UserError(
        f"{setting(f'the {split} split')} has {tokens} tokens and not one row of {key} {context}{group}: add text, "
        f"raise {setting('data.valid_fraction')} if the validation split is too short, or lower {key}"
    )
