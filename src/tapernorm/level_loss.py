"""The level loss, which is not in the paper: it levels the token scales at every tapered norm.

Trained models have massive activations: tokens whose scale is many times that of the others. A norm divides this scale
away, and a constant c cannot. The level loss reduces it while the norms still normalise, before the gate falls:

    level_weight * sum over tapered norms of E_{b,t} (log s - log level)^2

Before the calibration, the level is the geometric mean of s over the forward pass, without a gradient. Afterwards it is
1 / c. The calibration sets c = 1 / level from running means of log s, which single tokens hardly move. One token of 175
times the typical scale among 256 raises the geometric mean by 2 %, but it decides a least-squares fit.

Shapes: N norms, B batch, T time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .calibrate import RunningMean
from .norms import TaperNorm
from .scale_loss import ScaleProbe
from .token_mask import mean_over, number_of, sum_over
from .util.errors import UserError


class Levels(nn.Module):
    """The level loss and the running means of log s (N,) at `norms`. It is a submodule of the model."""

    norms: tuple[TaperNorm, ...]  # a tuple, so that the norms do not become submodules twice

    def __init__(self, norms: Sequence[TaperNorm], rate: float) -> None:
        super().__init__()
        self.norms = tuple(norms)
        for norm in norms:
            ScaleProbe.on(norm)
        weight = norms[0].weight
        self.running = RunningMean(len(norms), rate, dtype=weight.dtype, device=weight.device)

    def loss(self, *, calibrated: bool) -> Tensor:
        """Return the sum over norms of E (log s - log level)^2 in the last forward pass, a scalar."""
        parts = self._logs()
        if calibrated:
            levels = [-norm.c.mean().log() for norm in self.norms]
        else:
            levels = [mean_over(logs.detach(), counted) for logs, counted in parts]
        return torch.stack([level_loss(logs, level, of) for (logs, of), level in zip(parts, levels, strict=True)]).sum()

    @torch.no_grad()
    def collect(self) -> None:
        """Add the last forward pass to the running means."""
        parts = self._logs()
        self.running.add(torch.stack([sum_over(*part) for part in parts]), number_of(*parts[0]))

    def _logs(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return log s (B, T, 1) of the last forward pass at each norm, and which tokens count."""
        logs = [ScaleProbe.on(norm).scale(norm).log() for norm in self.norms]
        return [(log, norm.counted(log)) for norm, log in zip(self.norms, logs, strict=True)]

    def constants(self) -> Tensor:
        """Return c = 1 / level of each norm, (N,).

        Raises:
            UserError: there are no statistics, or they are not finite.
        """
        c = (-self.running.value()).exp()
        if not bool(c.isfinite().all()):
            raise UserError(
                "cannot calibrate from the levels of the scales, which are missing or not finite: train at g = 1 "
                "inside Taper.observe() before the taper starts, or attach with level_weight=0"
            )
        return c


def level_loss(logs: Tensor, level: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return E_{b,t} (log s - log level)^2 over the counted tokens, for log s (B, T, 1) and log level ()."""
    return mean_over((logs - level).square(), counted)
