"""The losses of the base model and of the folded model on every text of a taper, kept in scores.json."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapernorm.checkpoints.pretrained import load_pretrained
from tapernorm.checkpoints.store import load
from tapernorm.folding import fold
from tapernorm.norms import TaperNorm
from tapernorm.util.atomic_files import read_json, sha256_of, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest
from tapernorm.util.provenance import provenance

from ..data.blocks import Blocks
from ..data.tokenizers import Coder, open_tokenizer
from ..experiments.evaluate_corpora import target_bytes
from ..experiments.row_losses import score_rows
from .resolve import TaperRun

SCORES = "scores.json"


def take_scores(run: TaperRun, blocks: Mapping[tuple[str, str], Blocks], device: torch.device) -> dict[str, Any]:
    """Return text -> "before", "after" -> statistics; read them if the weights and texts are those of the file."""
    path, weights = run.out / SCORES, sha256_of(run.out / "model.safetensors")
    texts = {name: opened for (name, split), opened in blocks.items() if split == "valid"}
    identity = digest([weights, {name: opened.split["sha256"] for name, opened in texts.items()}])
    if (known := _told(path)).get("identity") == identity and "provenance" in known:
        return known["corpora"]
    coder, batch = open_tokenizer(run.out / "tokenizer"), run.hardware.micro_batch or 1
    makers = {"before": lambda: load_pretrained(run.base), "after": lambda: _finished(run.out)}
    corpora: dict[str, Any] = {name: {} for name in texts}
    for form, make in makers.items():
        model = make().to(device)
        for name, opened in texts.items():
            corpora[name][form] = _statistics(model, opened, coder, batch=batch, device=device)
    told = {"identity": identity, "corpora": corpora, "provenance": provenance(weights_sha256=weights)}
    write_json(path, {"schema_version": 1, "kind": "scores", **told})
    return corpora


def scores_in(run: Path) -> dict[str, Any]:
    """Return the scores of the weights in `run`; empty if there are none, or only those of other weights."""
    known = _told(run / SCORES)
    weights = known.get("provenance", {}).get("weights_sha256")
    return known["corpora"] if weights == sha256_of(run / "model.safetensors") else {}


def _told(path: Path) -> Mapping[str, Any]:
    """Read a file of scores; empty if it is missing or damaged, so that they are taken again."""
    try:
        return read_json(path)
    except (FileNotFoundError, UserError):
        return {}


def _finished(out: Path) -> nn.Module:
    """Load the trained model, folded unless it is a control."""
    model = load(out)
    return fold(model)[0] if any(isinstance(module, TaperNorm) for module in model.modules()) else model


def _statistics(model: nn.Module, blocks: Blocks, coder: Coder, *, batch: int, device: torch.device) -> dict[str, Any]:
    statistics = score_rows(model, blocks.rows, batch=batch, device=device).statistics()
    mean = statistics["rows"]["mean"]
    targets = blocks.rows.shape[0] * (blocks.rows.shape[1] - 1)
    size = target_bytes(blocks, coder)
    bits = None if mean is None or size == 0 else mean * targets / math.log(2) / size
    uniform = math.log(blocks.manifest["vocab_size"])
    return {**statistics, "uniform": uniform, "targets": targets, "bytes": size, "bits_per_byte": bits}
