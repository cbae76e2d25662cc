"""Beyond the paper: a loss that levels token scales at every tapered norm, so that one constant can stand for them.

Trained models hold massive activations: tokens whose scale is many times that of the others, which a norm divides away
and c cannot. This loss takes them down while the norms still work, before the gate falls:

    level weight * sum over tapered norms of E_{b,t} (log s - log level)^2

The level is the geometric mean of s over the forward pass, without a gradient, until c is calibrated, and 1 / c from
then on. c itself is 1 / level, from running means of log s: by least squares, one token of 175 times the scale in a row
of 256 would decide c; it moves the mean of log s by 2 %. N norms, B rows, T tokens.
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
    """The running means of log s at each of `norms`, (N,), and the loss; it lives in the model, and moves with it."""

    norms: tuple[TaperNorm, ...]  # a tuple, because they are submodules of the model already

    def __init__(self, norms: Sequence[TaperNorm], rate: float) -> None:
        super().__init__()
        self.norms = tuple(norms)
        for norm in norms:
            ScaleProbe.on(norm)
        weight = norms[0].weight
        self.running = RunningMean(len(norms), rate, dtype=weight.dtype, device=weight.device)

    def loss(self, *, calibrated: bool) -> Tensor:
        """sum over norms of E (log s - log level)^2 of the last forward pass, a scalar."""
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
        """log s (B, T, 1) of the last forward pass at each norm, and which tokens count."""
        logs = [ScaleProbe.on(norm).scale(norm).log() for norm in self.norms]
        return [(log, norm.counted(log)) for norm, log in zip(self.norms, logs, strict=True)]

    def constants(self) -> Tensor:
        """c = 1 / level of each norm, (N,)."""
        c = (-self.running.value()).exp()
        if not bool(c.isfinite().all()):
            raise UserError(
                "cannot calibrate from the levels of the scales: train at g = 1 inside Taper.observe() before the "
                "taper starts, or attach without level_weight"
            )
        return c


def level_loss(logs: Tensor, level: Tensor, counted: Tensor | None = None) -> Tensor:
    """E_{b,t} (log s - log level)^2 of logs of scales (B, T, 1) and of their level (), over the tokens that count."""
    return mean_over((logs - level).square(), counted)
