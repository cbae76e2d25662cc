"""What a training run writes down per logged step, and the growing file that holds it."""

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UserError
from .files import write_text

GROUPS = ("embeddings", "attention", "mlp", "norms")


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Parameters by what they belong to: embeddings (the head among them), attention, mlp, norms."""
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    for name, parameter in model.named_parameters():
        groups[_group_of(name)].append(parameter)
    return groups


def _group_of(name: str) -> str:
    if "norm" in name:
        return "norms"
    if "attn" in name:
        return "attention"
    return "mlp" if ".mlp." in name else "embeddings"


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Euclidean norm over all gradients, a scalar; a missing gradient counts as zero."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


class StepMeter:
    """Logit and pre-logit magnitudes over the micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self._logit_square = self._scale = 0.0  # means over tokens
        self._logit_max = self._scale_max = 0.0

    def add(self, share: float, logits: Tensor, scale: Tensor) -> None:
        """A micro-batch that is `share` of the batch: logits (b, T, V), pre-logit scale (b, T, 1)."""
        logits, scale = logits.detach().float(), scale.detach()
        low, high = logits.aminmax()
        self._logit_square += share * (torch.linalg.vector_norm(logits).item() ** 2 / logits.numel())
        self._logit_max = max(self._logit_max, high.item(), -low.item())
        self._scale += share * scale.mean().item()
        self._scale_max = max(self._scale_max, scale.max().item())

    def row(self, scale_target: Tensor | None) -> dict[str, float | None]:
        """The metrics, s_tgt among them once it is set."""
        target = None if scale_target is None else scale_target.item()
        return {
            "logit_rms": math.sqrt(self._logit_square),
            "logit_max": self._logit_max,
            "scale_mean": self._scale,
            "scale_max": self._scale_max,
            "scale_target": None if target is None or math.isnan(target) else target,
        }


class MetricsFile:
    """JSON lines that grow with the run; on resume, lines at or past the checkpoint's step are cut off."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self.path = path
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] < resume_step]
        write_text(path, "".join(line + "\n" for line in kept))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Make the lines durable; called before a checkpoint that follows them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]


def event_writer(folder: Path, resume_step: int) -> Callable[[dict[str, Any]], None]:
    """Writes metrics rows as TensorBoard scalars into `folder`.

    Raises:
        UserError: the tensorboard package is missing.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "hardware.tensorboard is on and tensorboard is not installed: pip install 'tapernorm[tensorboard]'"
        ) from None
    writer = SummaryWriter(str(folder), purge_step=resume_step)

    def write(row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                writer.add_scalar(name, value, row["step"])
        writer.flush()

    return write
