"""The scales of a finished taper: those of its base model and its own, on its held-out text."""

import math
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tapernorm.architectures import architecture_of
from tapernorm.checkpoints.pretrained import find, load_pretrained, model_digest
from tapernorm.checkpoints.store import load
from tapernorm.norms import TaperNorm
from tapernorm.spread import Outlier, ScaleSpread, measure
from tapernorm.util.atomic_files import read_json, sha256_of, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest
from tapernorm.util.provenance import provenance

from ..data.blocks import Blocks
from ..data.manifest import origin_of
from ..data.tokenizers import Coder, open_tokenizer, piece_of
from ..training.device import device_name, take_device
from .options import HELD_OUT

SCHEMA_VERSION = 1
KIND = "spread"
BEFORE, AFTER = "before", "after"
_BATCH = 4  # rows per forward pass


def spread_run(run: Path, out: Path, *, tokens: int, device: str, threads: int) -> dict[str, Any]:
    """Measure the base model and the tapered model of `run` on about `tokens` tokens.

    The result is written into `out` and returned. A result of the same weights and text is read from there.

    Raises:
        UserError: `run` is no finished run of `tapernorm taper`, or its base model has changed.
    """
    told = result_of(run)
    base = find(told["base"]["source"])
    if model_digest(base) != told["base"]["digest"]:
        raise UserError(f"{base} has changed since {run} was made from it: restore that model, or taper the new one")
    blocks = Blocks.open(run / "data" / HELD_OUT / "blocks", "valid")
    rows = blocks.rows[: max(2, tokens // blocks.rows.shape[1])]
    weights = sha256_of(run / "model.safetensors")
    identity = digest([weights, told["base"]["digest"], blocks.split["sha256"], len(rows)])
    if out.is_file() and (known := read_json(out)).get("identity") == identity:
        return known
    chosen = take_device(device, threads)
    before = measure(load_pretrained(base).to(chosen), rows, batch=_BATCH)
    tapered = load(run).to(chosen)
    after = measure(tapered, rows, batch=_BATCH)
    coder = open_tokenizer(run / "tokenizer")
    constants = _constants(tapered)
    result = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "identity": identity,
        "base": {key: told["base"][key] for key in ("source", "commit", "digest")},
        "job": told["job"],
        "text": origin_of(blocks.manifest),
        "rows": len(rows),
        "context": rows.shape[1],
        "norms": [
            {
                "norm": name,
                "c": constants.get(name),
                BEFORE: _entry(before[name], rows, coder),
                AFTER: _entry(after[name], rows, coder),
            }
            for name in before
        ],
        "provenance": provenance(
            config_hash=told["provenance"]["config_hash"],
            weights_sha256=weights,
            device=device_name(chosen),
            seed=told["job"]["seed"],
        ),
    }
    write_json(out, result)
    return result


def result_of(run: Path) -> dict[str, Any]:
    """Read the result of a finished taper.

    Raises:
        UserError: the folder holds none.
    """
    if not (run / "result.json").is_file():
        raise UserError(f"{run} holds no result.json: give the run folder of a finished `tapernorm taper`")
    told = read_json(run / "result.json")
    if "base" not in told:
        raise UserError(
            f"{run} is no run of `tapernorm taper`, as result.json names no base model: give the folder of such a run"
        )
    return told


def _constants(model: nn.Module) -> dict[str, float]:
    """Return the constant c of every tapered norm."""
    norms = {name: model.get_submodule(name) for name in architecture_of(model).norms(model)}
    return {name: norm.c.mean().item() for name, norm in norms.items() if isinstance(norm, TaperNorm)}


def _entry(spread: ScaleSpread, rows: Tensor, coder: Coder) -> dict[str, Any]:
    """Return the scales of one norm for JSON, with None for a number that is not finite."""
    return {
        "first": _number(spread.first),
        "quantiles": {f"{q:g}": _number(value) for q, value in spread.quantiles.items()},
        "nonfinite": spread.nonfinite,
        "worst": [_told(outlier, rows, coder) for outlier in spread.worst],
    }


def _told(outlier: Outlier, rows: Tensor, coder: Coder) -> dict[str, Any]:
    piece = piece_of(coder, rows[outlier.row].tolist(), outlier.position)
    return {"row": outlier.row, "position": outlier.position, "piece": piece, "scale": _number(outlier.scale)}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
