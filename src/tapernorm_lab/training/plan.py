"""The plan of a training, without the model: optimizer, learning rate, batches and validation.

B batch, T context, R rows of a split.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from tapernorm.linear_kernel import LinearKernel, set_linear_kernel
from tapernorm.schedule import lr_at
from tapernorm.util.atomic_files import read_json, write_json

from ..config.jobs import TuningJob
from ..config.sections import HardwareConfig, TrainConfig
from ..data.blocks import Blocks, batch_of
from ..data.token_stream import TokenStream, windows
from .device import choose, maps_of
from .ranks import from_leader
from .training_loss import next_tokens
from .validation_loss import Evaluation, evaluate, evaluate_blocks


@dataclass(frozen=True)
class Optimisation:
    """AdamW, learning-rate schedule, clipping and precision (method.md sections 9 and 10).

    Attributes:
        lr: peak learning rate.
        min_lr: learning rate at the end of the cosine.
        warmup: steps of linear warm-up.
        decay: step at which the cosine ends; may lie after the last step of the run.
        betas: decay rates of AdamW's moments.
        adam_eps: AdamW's epsilon.
        weight_decay: weight decay of matrices; vectors have none.
        clip_norm: clipping threshold of the global gradient norm.
        precision: bf16 means autocast; weights keep their type.
        log_every: steps between lines of metrics.
        eval_every: steps between evaluations; 0: at the end only.
    """

    lr: float
    min_lr: float
    warmup: int
    decay: int
    betas: tuple[float, float]
    adam_eps: float
    weight_decay: float
    clip_norm: float
    precision: Literal["float32", "bf16"]
    log_every: int
    eval_every: int

    @classmethod
    def of_pretraining(cls, train: TrainConfig, steps: int) -> Self:
        """Return warm-up over a fraction of the steps, then a cosine to zero at the last step (section 9)."""
        shared = train.model_dump(exclude={"batch", "warmup_fraction"})
        return cls(min_lr=0.0, warmup=round(train.warmup_fraction * steps), decay=steps, **shared)

    @classmethod
    def of_finetuning(cls, job: TuningJob) -> Self:
        """Return warm-up and cosine decay to `min_lr`, both given in steps (section 10)."""
        shared = job.train.model_dump(exclude={"ema_rate"})
        return cls(lr=job.lr, min_lr=job.min_lr, warmup=job.warmup_steps, decay=job.decay_steps, **shared)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of optimizer step k = `step`."""
        return lr_at(step, steps=self.decay, peak=self.lr, warmup=self.warmup, floor=self.min_lr)

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """Return a fused AdamW with weight decay on matrices only."""
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.adam_eps, fused=True)


@dataclass(frozen=True)
class Plan:
    """Everything that the trainer needs besides the model.

    Attributes:
        label: name of the run in messages.
        seed: seed of dropout.
        steps: optimizer steps.
        optimisation: optimizer, schedule and precision.
        hardware: micro-batch, devices, compilation and checkpoint interval.
        batch_at: step -> inputs and targets of the whole batch, each (B, T) int64, the same on every rank. `IGNORED`
            marks a position without a target; every row has the same number of targets.
        validate: scores the validation split with the present model; the same on every rank.
        tokens_per_step: tokens of the whole batch.
        fingerprint: digest of everything that defines the numbers; a checkpoint with another one is refused.
        folder: where checkpoints and growing metrics lie until the run is done.
        events: folder of TensorBoard event files; None: none are written.
        remedy: settings to change after a divergence, as the message gives them.
        salvage: called on every rank after a divergence with the number of finished steps. It saves what is useful of
            the model at that step, and returns a message about it.
        tolerant: whether a final score that is not finite is a result instead of a divergence.
    """

    label: str
    seed: int
    steps: int
    optimisation: Optimisation
    hardware: HardwareConfig
    batch_at: Callable[[int], tuple[Tensor, Tensor]]
    validate: Callable[[], Evaluation]
    tokens_per_step: int
    fingerprint: str
    folder: Path
    events: Path | None = None
    remedy: str = "lower train.lr or train.clip_norm"
    salvage: Callable[[int], str] | None = None
    tolerant: bool = False


def plan_on_blocks(
    model: nn.Module,
    train: Blocks,
    valid: Blocks,
    out: Path,
    *,
    seed: int,
    batch: int,
    scored: int,
    fingerprint: str,
    hardware: HardwareConfig,
    **settings: Any,
) -> Plan:
    """Return the plan of a training of `model` on rows of blocks, for the run folder `out`.

    Args:
        batch: rows per optimizer step.
        scored: rows per forward pass of the validation.
        settings: the other attributes of `Plan`.
    """
    device = next(model.parameters()).device
    return Plan(
        seed=seed,
        batch_at=lambda step: next_tokens(batch_of(train, seed=seed, step=step, batch=batch)),
        validate=lambda: evaluate_blocks(model, valid.rows, batch=scored, device=device),
        tokens_per_step=batch * train.rows.shape[1],
        hardware=hardware,
        **_places(out, fingerprint, hardware),
        **settings,
    )


def plan_of_tuning(
    model: nn.Module,
    train: Blocks,
    valid: Blocks,
    out: Path,
    job: TuningJob,
    hardware: HardwareConfig,
    **settings: Any,
) -> Plan:
    """Return the plan of a fine-tune of `model` on rows of blocks, for the run folder `out`.

    Args:
        settings: label, fingerprint and the other attributes of `Plan`.
    """
    return plan_on_blocks(
        model,
        train,
        valid,
        out,
        seed=job.seed,
        steps=job.steps,
        batch=job.batch,
        scored=hardware.micro_batch or job.batch,
        optimisation=Optimisation.of_finetuning(job),
        hardware=hardware,
        **settings,
    )


def plan_on_stream(
    model: nn.Module,
    train: TokenStream,
    valid: TokenStream,
    out: Path,
    *,
    seed: int,
    batch: int,
    context: int,
    fingerprint: str,
    hardware: HardwareConfig,
    **settings: Any,
) -> Plan:
    """Return the plan of a training of `model` on windows of a token stream, for the run folder `out`.

    Args:
        batch: windows per optimizer step, and per forward pass of the validation.
        settings: the other attributes of `Plan`.
    """
    device, size = next(model.parameters()).device, valid.split["bytes"]
    shape = {"batch": batch, "context": context}

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        both = windows(train, seed=seed, step=step, **shape)  # (B, T + 1)
        return both[:, :-1], both[:, 1:]

    return Plan(
        seed=seed,
        batch_at=batch_at,
        validate=lambda: evaluate(model, valid.tokens, text_bytes=size, device=device, **shape),
        tokens_per_step=batch * context,
        hardware=hardware,
        **_places(out, fingerprint, hardware),
        **settings,
    )


def _places(out: Path, fingerprint: str, hardware: HardwareConfig) -> dict[str, Any]:
    events = out / "tensorboard" if hardware.tensorboard else None
    return {"fingerprint": fingerprint, "folder": out / "resume" / fingerprint, "events": events}


def settle_linear_kernel(plan: Plan, model: nn.Module) -> Plan:
    """Choose the kernel of this process for the training of `model`, by hardware.linear; the plan that names it.

    A choice by measurement lies in the plan's folder, for an attempt that resumes.

    Raises:
        UserError: as `set_linear_kernel`.
    """
    asked = plan.hardware.linear
    kernel: LinearKernel = "aten"
    if next(model.parameters()).device.type == "cpu":
        kernel = from_leader(lambda: _kept_choice(plan, model)) if asked == "auto" else asked
    set_linear_kernel(kernel)
    return replace(plan, hardware=plan.hardware.model_copy(update={"linear": kernel}))


def _kept_choice(plan: Plan, model: nn.Module) -> LinearKernel:
    if plan.optimisation.precision != "float32":
        return "aten"
    file = plan.folder / "kernels.json"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        inputs, _ = plan.batch_at(0)
        write_json(file, choose(maps_of(model, inputs[: plan.hardware.micro_batch].numel())))
    return read_json(file)["linear"]
