"""Optimizer, learning rate and precision of a training run, whatever its kind."""

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import nn

from tapernorm.schedule import lr_at

from ..config.jobs import TuningJob
from ..config.sections import TrainConfig


@dataclass(frozen=True)
class Optimisation:
    """AdamW, a warm-up and a cosine, clipping and precision (method.md sections 9 and 10).

    Attributes:
        lr: peak of the learning rate.
        min_lr: what the cosine falls to.
        warmup: steps of linear warm-up.
        decay: the step at which the cosine ends; may lie after the last step of the run.
        clip_norm: largest global gradient norm.
        precision: bf16 is autocast, weights stay as they are.
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
        """Warm-up over a fraction of the steps, cosine to zero at the last one (section 9)."""
        shared = train.model_dump(exclude={"batch", "warmup_fraction"})
        return cls(min_lr=0.0, warmup=round(train.warmup_fraction * steps), decay=steps, **shared)

    @classmethod
    def of_finetuning(cls, job: TuningJob) -> Self:
        """Warm-up and cosine in steps, to a floor (section 10)."""
        shared = job.train.model_dump(exclude={"ema_rate"})
        return cls(lr=job.lr, min_lr=job.min_lr, warmup=job.warmup_steps, decay=job.decay_steps, **shared)

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step k = `step`."""
        return lr_at(step, steps=self.decay, peak=self.lr, warmup=self.warmup, floor=self.min_lr)

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """AdamW with weight decay on matrices only, fused."""
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.adam_eps, fused=True)
