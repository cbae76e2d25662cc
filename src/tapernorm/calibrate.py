"""Running means behind the constants c of equation (4) of `taper` and the scale target s_tgt of equation (5).

A forward pass adds sums over its batch, and the number of its tokens, to preallocated buffers. The EMA update divides
the sums by the count, once per optimizer step. The mean is therefore the same under gradient accumulation and under
activation checkpointing.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .util.distributed import sum_over_ranks
from .util.errors import UserError
from .util.wide_buffers import WideBuffers


class RunningMean(WideBuffers):
    """Bias-corrected EMA of the batch means of `size` quantities, in float32 or wider.

    An update is ema <- (1 - m) ema + m mean(batch), from 0. After n updates the value is ema / (1 - (1 - m)^n). The
    rate is m.

    Raises:
        ValueError: m lies outside (0, 1].
    """

    sums: torch.Tensor  # (size,) over the current optimizer step
    count: torch.Tensor  # () number of tokens in `sums`
    ema: torch.Tensor  # (size,)
    updates: torch.Tensor  # () n

    def __init__(self, size: int, rate: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        if not 0 < rate <= 1:
            raise ValueError(f"EMA rate must lie in (0, 1], got {rate}")
        self.rate = rate
        wide = torch.promote_types(dtype, torch.float32)
        for name, shape in {"sums": (size,), "count": (), "ema": (size,), "updates": ()}.items():
            self.register_buffer(name, torch.zeros(shape, dtype=wide, device=device), persistent=False)

    def add(self, sums: torch.Tensor, count: int | torch.Tensor) -> None:
        """Add the sums (size,) of a micro-batch of `count` tokens."""
        self.sums.add_(sums)
        self.count.add_(count)

    @torch.no_grad()
    def update(self) -> None:
        """Update the EMA by the mean of everything added since the last update. Without additions, do nothing."""
        if self.count == 0:
            return
        self.ema.mul_(1 - self.rate).add_(self.sums / self.count, alpha=self.rate)
        self.updates.add_(1)
        self.forget()

    def forget(self) -> None:
        """Discard what was added since the last update."""
        self.sums.zero_()
        self.count.zero_()

    def value(self) -> torch.Tensor:
        """Return the bias-corrected means (size,). They are NaN before the first update."""
        return self.ema / (1 - (1 - self.rate) ** self.updates)


def update_means(means: Iterable[RunningMean]) -> None:
    """Update each EMA by the mean over the whole batch of an optimizer step: all micro-batches of all ranks."""
    means = list(means)
    sum_over_ranks(part for mean in means for part in (mean.sums, mean.count))
    for mean in means:
        mean.update()


def require_training(norms: Mapping[str, Any]) -> None:
    """Raise UserError if a norm in eval mode has added nothing to its `statistics` since the last update."""
    idle = [name for name, norm in norms.items() if not norm.training and not bool(norm.statistics.count)]
    if idle:
        more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        raise UserError(
            f"nothing was observed at {idle[0]}{more}, which is in eval mode (from_pretrained returns models in eval "
            "mode): call model.train() before the training loop"
        )


def least_squares_c(means: torch.Tensor) -> torch.Tensor:
    """Return c = E[||v gamma||^2 / s] / E[||v gamma||^2], equation (4), from those two means (2,)."""
    return means[0] / means[1]
