"""The filter of evaluation rows: drop each row with a token that does not occur in another text.

The remaining rows hold only tokens that a model can have seen in training (the paper's filtered Pile). The other text
is a whole training split, or a number of rows drawn from it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapernorm.util.atomic_files import sha256_of, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest
from tapernorm.util.rng import generator

from ..config.jobs import FilterJob
from .blocks import Blocks
from .manifest import made_manifest, whole_files

_IDS = 1 << 22  # ids in memory at once
_NAMED = 20  # tokens that the manifest names


def filter_rows(job: FilterJob, rows: Path, seen: Path, out: Path) -> dict[str, Any]:
    """Write into `out` the rows of `rows` (split valid) whose tokens all occur in `seen` (split train).

    Both are folders of blocks of the same tokenizer. The order of the rows is kept. `seen_rows` limits the comparison
    to that many rows of `seen`, drawn without replacement and with a fixed seed. Returns the manifest.

    Raises:
        UserError: the tokenizers differ, `seen` has fewer rows than `seen_rows`, or no row is left.
    """
    source, text = Blocks.open(rows, "valid"), Blocks.open(seen, "train")
    _require_one_tokenizer(source, text, rows, seen)
    vocab_size = source.manifest["vocab_size"]
    known = torch.zeros(vocab_size, dtype=torch.bool)  # (V,)
    for chunk in _drawn(text, job.seen_rows, seen):
        known[chunk.to(torch.int64).flatten()] = True
    kept, dropped_by = 0, torch.zeros(vocab_size, dtype=torch.int64)
    with whole_files(out, "valid.bin") as files:
        with open(files["valid.bin"], "wb") as file:
            for chunk in _chunks(source.rows):
                stays = known[chunk.to(torch.int64)].all(dim=1)  # (rows of the chunk,)
                file.write(chunk.numpy()[stays.numpy()].tobytes())
                kept += int(stays.sum())
                dropped_by += _rows_with(chunk, vocab_size)
        if kept == 0:
            raise UserError(
                f"each of the {len(source.rows)} rows of {rows} has a token that {seen} lacks: compare with more or "
                "other text (seen, seen_rows), or use shorter rows"
            )
        of_source = source.manifest.get("details", {})
        details = {
            **{key: of_source[key] for key in ("sources", "hub", "files") if key in of_source},
            "rows": len(source.rows),
            "kept": kept,
            "dropped": len(source.rows) - kept,
            "unseen": _unseen(dropped_by * ~known),
            "of_sha256": source.split["sha256"],
            "seen": {"rows": job.seen_rows or len(text.rows), "of": len(text.rows), "sha256": text.split["sha256"]},
        }
        entry = {"rows": kept, "documents": None, "tokens_dropped": 0, "sha256": sha256_of(files["valid.bin"])}
        said = {**source.manifest, "splits": {"valid": entry}, "details": details}
        manifest = {**said, **made_manifest("blocks", config_hash=digest(job))}
        write_json(files["manifest.json"], manifest)
    return manifest


def _require_one_tokenizer(source: Blocks, text: Blocks, rows: Path, seen: Path) -> None:
    hashes = [blocks.manifest["tokenizer_sha256"] for blocks in (source, text)]
    if hashes[0] != hashes[1]:
        raise UserError(
            f"{rows} was written with the tokenizer {hashes[0][:16]} and {seen} with {hashes[1][:16]}: use one for both"
        )


def _drawn(text: Blocks, count: int | None, seen: Path) -> Iterator[Tensor]:
    """Return all rows of a split, or `count` rows drawn from it, in chunks."""
    if count is None:
        return _chunks(text.rows)
    if count > len(text.rows):
        raise UserError(
            f"seen_rows is {count}, but {seen} has {len(text.rows)} rows: lower it, or set it to null for all"
        )
    order = torch.randperm(len(text.rows), generator=generator(0, "filter/seen"))
    return (text.rows[row : row + 1] for row in order[:count].tolist())


def _chunks(rows: Tensor) -> Iterator[Tensor]:
    return iter(rows.split(max(_IDS // rows.shape[1], 1)))


def _rows_with(chunk: Tensor, vocab_size: int) -> Tensor:
    """Return the number of rows of the chunk in which each id occurs, (V,) int64."""
    ids, _ = chunk.to(torch.int64).sort(dim=1)
    first = torch.ones_like(ids, dtype=torch.bool)  # whether it is the first occurrence of its id in its row
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return torch.bincount(ids[first], minlength=vocab_size)


def _unseen(rows_with: Tensor) -> dict[str, Any]:
    """Return a manifest's entry on the ids that drop rows: their number, and the ids that occur in the most rows."""
    most = rows_with.argsort(descending=True, stable=True)[:_NAMED].tolist()
    named = [{"id": i, "rows": int(rows_with[i])} for i in most if rows_with[i] > 0]
    return {"tokens": int((rows_with > 0).sum()), "most": named}
