"""The metrics of a logged training step, and the growing file that holds them."""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.architectures import architecture_of
from tapernorm.util.atomic_files import unwritable
from tapernorm.util.errors import UserError

from .ranks import gathered

GROUPS = ("embeddings", "attention", "mlp", "norms")


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Group the parameters of `model` into embeddings (with the head), attention, mlp and norms."""
    arch = architecture_of(model)
    norms = {*arch.internal_norms(model), arch.final}
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    for name, parameter in model.named_parameters():
        groups["norms" if name.rpartition(".")[0] in norms else _group_of(name)].append(parameter)
    return groups


def _group_of(name: str) -> str:
    if "attn" in name:
        return "attention"
    return "mlp" if ".mlp." in name else "embeddings"


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the Euclidean norm of all gradients, a scalar; a missing gradient counts as zero."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


class StepMeter:
    """Logit and pre-logit magnitudes over the micro-batches of one optimizer step, on all ranks."""

    def __init__(self) -> None:
        self._logit_square = self._logit_variance = self._scale = 0.0  # means over tokens
        self._logit_max = self._scale_max = 0.0

    @torch.no_grad()
    def add(self, share: float, logits: Iterable[Tensor], scale: Tensor) -> None:
        """Add a micro-batch, `share` of the whole batch: chunks (n, V) of logits, pre-logit scale (b, T, 1)."""
        for some in logits:
            some = some.to(torch.promote_types(some.dtype, torch.float32))
            weight = share * len(some) / scale.numel()
            low, high = some.aminmax()
            self._logit_square += weight * (torch.linalg.vector_norm(some).item() ** 2 / some.numel())
            centred = some - some.mean(-1, keepdim=True)  # Tensor.var takes many times as long on a CPU
            self._logit_variance += weight * (torch.linalg.vector_norm(centred).item() ** 2 / some.numel())
            self._logit_max = max(self._logit_max, high.item(), -low.item())
        self._scale += share * scale.mean().item()
        self._scale_max = max(self._scale_max, scale.max().item())

    def row(self) -> dict[str, float]:
        """Return the metrics of the step, the same on every rank."""
        means = [self._logit_square, self._logit_variance, self._scale]
        every = gathered([*means, self._logit_max, self._scale_max])  # (ranks, 5)
        logit_square, logit_variance, scale = every[:, :3].sum(0).tolist()
        logit_max, scale_max = every[:, 3:].amax(0).tolist()
        return {
            "logit_rms": math.sqrt(logit_square),
            "logit_rms_centred": math.sqrt(logit_variance),  # without each token's mean, which softmax ignores
            "logit_max": logit_max,
            "scale_mean": scale,
            "scale_max": scale_max,
        }


class MetricsFile:
    """A file of JSON lines that grows with the run, with the same rows as optional TensorBoard scalars.

    Args:
        path: the file.
        keep_bytes: bytes of an earlier attempt's file that stay: the result of `sync` at the resumed checkpoint.
        events: folder of the TensorBoard event files; None: none are written.
        step: first step of this attempt; TensorBoard hides later steps of an earlier attempt.

    Raises:
        UserError: the file is shorter than `keep_bytes`, or the tensorboard package is missing.
    """

    def __init__(self, path: Path, *, keep_bytes: int, events: Path | None = None, step: int = 0) -> None:
        self.path = path
        self._events: Any = None if events is None else _event_writer(events, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        size = path.stat().st_size
        if size < keep_bytes:
            self.close()
            raise UserError(
                f"{path} has {size} bytes, but its checkpoint needs {keep_bytes}: it was cut short; "
                f"delete {path.parent} to start again from step 0"
            )
        self._file.truncate(keep_bytes)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row. Raises UserError if the file cannot be written."""
        line = json.dumps(row, allow_nan=False) + "\n"
        try:
            self._write_all(line.encode("utf-8"))
        except OSError as error:
            raise unwritable(self.path, error) from error
        if self._events is not None:
            for name, value in row.items():
                if name != "step" and value is not None:
                    self._events.add_scalar(name, value, row["step"])
            self._events.flush()

    def _write_all(self, content: bytes) -> None:
        while content:
            content = content[self._file.write(content) :]

    def sync(self) -> int:
        """Flush the lines to disk before a checkpoint, and return the size of the file in bytes."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


class NoMetrics:
    """A replacement of `MetricsFile` on ranks that write no file."""

    def write(self, row: dict[str, Any]) -> None:
        """Do nothing."""

    def sync(self) -> int:
        return 0

    def close(self) -> None:
        """Do nothing."""


def _event_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "hardware.tensorboard needs the package tensorboard: run pip install '.[tensorboard]' in the checkout, or "
            "set hardware.tensorboard to false"
        ) from None
    return SummaryWriter(str(folder), purge_step=step)
