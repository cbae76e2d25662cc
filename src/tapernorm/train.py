"""The one trainer: a loop over optimizer steps that can be killed anywhere and resumed bitwise.

Step k is a function of (settings, k, state): the batch, the learning rate and the gate are pure
functions of k, so nothing is fast-forwarded on resume, and evaluation or logging cannot shift training.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .anchor import ScaleProbe
from .arch import architecture_of
from .checkpoint import Checkpoints
from .config import HardwareConfig, TrainConfig
from .errors import UserError
from .evaluate import Evaluation
from .files import read_json, write_json
from .metrics import MetricsFile, StepMeter, gradient_norm, parameter_groups
from .progress import Progress
from .schedule import lr_at
from .taper import Taper


class Diverged(UserError):
    """A loss or gradient is not finite; raised before the optimizer step that would have used it."""


@dataclass(frozen=True)
class Plan:
    """What the trainer runs: everything but the model.

    Attributes:
        batch_at: step -> token windows (B, T+1) int64.
        validate: scores the validation split with the model as it stands.
        fingerprint: digest of whatever defines the numbers; checkpoints of others never load.
        folder: where checkpoints and growing metrics live until the run is done.
        events: where TensorBoard event files go; None: none are written.
    """

    label: str
    steps: int
    settings: TrainConfig
    hardware: HardwareConfig
    batch_at: Callable[[int], Tensor]
    validate: Callable[[], Evaluation]
    tokens_per_step: int
    fingerprint: str
    folder: Path
    events: Path | None = None


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one.

    Raises:
        UserError: CUDA is asked for and absent.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("device cuda: this PyTorch sees no CUDA device; set hardware.device to auto or cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def has_compiler(device: torch.device) -> bool:
    """Whether torch.compile can build code here: on a CPU it needs a C++ compiler."""
    return device.type == "cuda" or any(map(shutil.which, ("g++", "clang++", "c++")))


def require_compiler(device: torch.device) -> None:
    """Raise UserError where torch.compile cannot work."""
    if not has_compiler(device):
        raise UserError("torch.compile needs a C++ compiler on a CPU: install g++, or leave compile off")


def make_optimizer(model: nn.Module, settings: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, fused."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.adam_eps, fused=True)


def training_loss(model: nn.Module, taper: Taper | None, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(CE, weighted anchor loss, logits (B, T, V)) of windows (B, T+1): the function that `compile: true` compiles."""
    logits = model(windows[:, :-1])
    wide = torch.promote_types(logits.dtype, torch.float32)
    ce = F.cross_entropy(logits.flatten(0, 1).to(wide), windows[:, 1:].flatten())
    aux = ce.new_zeros(()) if taper is None else taper.anchor_loss()
    return ce, aux, logits


class Trainer:
    """Trains `model` by `plan`, resuming from its newest checkpoint."""

    def __init__(self, model: nn.Module, taper: Taper | None, plan: Plan) -> None:
        self.model, self.taper, self.plan = model, taper, plan
        self.device = next(model.parameters()).device
        self.optimizer = make_optimizer(model, plan.settings)
        if taper is not None:
            taper.check(self.optimizer)
        self.parameters = list(model.parameters())
        self.groups = parameter_groups(model)
        self.final_norm = model.get_submodule(architecture_of(model).final)
        self.probe = ScaleProbe.on(self.final_norm)
        if plan.hardware.compile:
            require_compiler(self.device)
        self.loss = torch.compile(training_loss, dynamic=False) if plan.hardware.compile else training_loss
        self.checkpoints = Checkpoints(plan.folder, plan.fingerprint)
        self.elapsed_s = 0.0  # training time, over all resumes
        self._metrics_bytes = 0  # of the metrics file, at the last checkpoint

    def run(self) -> Evaluation:
        """Train to the last step; the validation score of the finished model.

        Raises:
            Diverged: now, or in an earlier attempt at the same run, which is not repeated.
        """
        self._refuse_known_divergence()
        start = self._resume()
        metrics = MetricsFile(
            self.plan.folder / "metrics.jsonl", keep_bytes=self._metrics_bytes, events=self.plan.events, step=start
        )
        progress = Progress(self.plan.label, start=start, total=self.plan.steps)
        self.model.train()
        try:
            for k in range(start, self.plan.steps):
                row = self._timed_step(k)
                if k % self.plan.settings.log_every == 0 or k == self.plan.steps - 1:
                    metrics.write(row)
                self._validate(k, metrics)
                self._checkpoint(k + 1, metrics)
                progress.update(k + 1, row["loss"], row["gate"])
        finally:
            progress.close()
            metrics.close()
        if self.taper is not None:
            self.taper.set_step(self.plan.steps)
        return self._score(self.plan.steps - 1)

    def step(self, k: int) -> dict[str, Any]:
        """Optimizer step k; returns its metrics.

        Raises:
            Diverged: before anything was updated.
        """
        settings = self.plan.settings
        lr = lr_at(k, steps=self.plan.steps, peak=settings.lr, warmup=round(settings.warmup_fraction * self.plan.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.taper is not None:
            self.taper.set_step(k)
        logged = k % settings.log_every == 0 or k == self.plan.steps - 1
        meter = StepMeter() if logged else None
        ce, aux = self._accumulate(self.plan.batch_at(k).to(self.device, non_blocking=True), meter)
        norm = gradient_norm(self.parameters)
        ce_value, aux_value, norm_value = torch.stack([ce.double(), aux.double(), norm.double()]).tolist()
        self._require_finite(k, {"cross-entropy": ce_value, "anchor loss": aux_value, "gradient norm": norm_value})
        row = {
            "step": k,
            "ce": ce_value,
            "aux": aux_value,
            "loss": ce_value + aux_value,
            "gate": 1.0 if self.taper is None else self.taper.gate.item(),
            "lr": lr,
            "grad_norm": norm_value,
        }
        if meter is not None:
            row |= {f"grad_norm_{name}": gradient_norm(group).item() for name, group in self.groups.items()}
            row |= meter.row(None if self.taper is None else self.taper.scale_target)
            self._require_finite(k, {name: value for name, value in row.items() if value is not None})
        nn.utils.clip_grads_with_norm_(self.parameters, settings.clip_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return row

    def _accumulate(self, windows: Tensor, meter: StepMeter | None) -> tuple[Tensor, Tensor]:
        """Gradients and means (CE, weighted anchor loss) over the whole batch (B, T+1), micro-batch by micro-batch."""
        precision = torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.settings.precision == "bf16")
        ce_sum, aux_sum = (torch.zeros((), device=self.device) for _ in range(2))
        with nullcontext() if self.taper is None else self.taper.observe():
            for rows in windows.split(self.plan.hardware.micro_batch or len(windows)):
                share = len(rows) / len(windows)
                with precision:
                    ce, aux, logits = self.loss(self.model, self.taper, rows)
                ((ce + aux) * share).backward()
                ce_sum = ce_sum + ce.detach() * share
                aux_sum = aux_sum + aux.detach() * share
                if meter is not None:
                    meter.add(share, logits, self.probe.scale(self.final_norm))
        return ce_sum, aux_sum

    def _timed_step(self, k: int) -> dict[str, Any]:
        began = time.perf_counter()
        row = self.step(k)
        took = time.perf_counter() - began
        self.elapsed_s += took
        return row | {"tokens_per_s": self.plan.tokens_per_step / took, "elapsed_s": self.elapsed_s}

    def _validate(self, k: int, metrics: MetricsFile) -> None:
        every = self.plan.settings.eval_every
        if every and (k + 1) % every == 0:
            score = self._score(k)
            row = {"step": k, "valid_ce": score.ce, "bits_per_byte": score.bits_per_byte}
            metrics.write(row | {"elapsed_s": self.elapsed_s})

    def _score(self, k: int) -> Evaluation:
        score = self.plan.validate()
        self._require_finite(k, {"validation cross-entropy": score.ce})
        return score

    def _checkpoint(self, done: int, metrics: MetricsFile) -> None:
        if done % self.plan.hardware.checkpoint_every == 0 or done == self.plan.steps:
            self._metrics_bytes = metrics.sync()
            self.checkpoints.save(done, self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "taper": None if self.taper is None else self.taper.state_dict(),
            "elapsed_s": self.elapsed_s,
            "metrics_bytes": self._metrics_bytes,
        }

    def _resume(self) -> int:
        """Load the newest checkpoint, if any; the number of steps already done."""
        found = self.checkpoints.latest()
        if found is None:
            return 0
        step, state = found
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.taper is not None:
            self.taper.load_state_dict(state["taper"])
        self.elapsed_s, self._metrics_bytes = state["elapsed_s"], state["metrics_bytes"]
        print(f"{self.plan.label}: resuming after step {step} of {self.plan.steps}", file=sys.stderr)
        return step

    @property
    def _marker(self) -> Path:
        return self.plan.folder / "diverged.json"

    def _refuse_known_divergence(self) -> None:
        if self._marker.exists() and (known := read_json(self._marker))["fingerprint"] == self.plan.fingerprint:
            raise Diverged(known["message"])

    def _require_finite(self, k: int, values: dict[str, float]) -> None:
        bad = next((name for name, value in values.items() if not math.isfinite(value)), None)
        if bad is None:
            return
        bad = f"the {bad}"
        for name, parameter in self.model.named_parameters():
            if bad == "the gradient norm" and parameter.grad is not None and not parameter.grad.isfinite().all():
                bad = f"the gradient of {name}"
        message = (
            f"{self.plan.label}: {bad} is not finite at step {k}; stopped before another update. Checkpoints of "
            f"earlier steps stay in {self.plan.folder}. The same run would diverge again and is refused: lower "
            f"train.lr or train.clip_norm, or delete {self._marker} to try it all the same"
        )
        write_json(self._marker, {"fingerprint": self.plan.fingerprint, "step": k, "tensor": bad, "message": message})
        raise Diverged(message)
