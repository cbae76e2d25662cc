"""How the per-token scale of each norm is distributed over text: whether one constant c can stand for it.

A token whose scale is k times the typical one comes out of a tapered norm k times as large as its norm would make it.
Trained models have such tokens, at the first position and at delimiters. N norms, R rows, T tokens of a row, D width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from .architectures import architecture_of, logits_of
from .norms import is_norm, norm_scale
from .util.errors import UserError
from .util.module_modes import evaluating
from .util.progress import tracked

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
WORST = 5  # tokens that are named, of each norm

# From here on one constant cannot stand for the scale of a token; in multiples of the norm's median scale.
FIRST_LIMIT = 5.0  # the median at position 0
TAIL_LIMIT = 4.0  # the 99.9th percentile at later positions


@dataclass(frozen=True)
class Outlier:
    """One token with an extreme scale."""

    row: int
    position: int  # in its row
    token: int  # its id
    scale: float


@dataclass(frozen=True)
class ScaleSpread:
    """The scales s of one norm's input over some rows of text; position 0 stands apart.

    Attributes:
        first: median over rows of s at position 0.
        quantiles: q -> the q quantile of s over positions >= 1, for each of `QUANTILES`, exact.
        nonfinite: tokens without a finite scale; they count as larger than any number.
        worst: the tokens of the largest scales at positions >= 1, largest first.
    """

    norm: str
    tokens: int
    first: float
    quantiles: dict[float, float]
    nonfinite: int
    worst: tuple[Outlier, ...]

    @property
    def median(self) -> float:
        return self.quantiles[0.5]

    @property
    def p99_9(self) -> float:
        return self.quantiles[0.999]

    @property
    def largest(self) -> float:
        """The largest scale at positions >= 1."""
        return self.worst[0].scale

    @property
    def misfits(self) -> tuple[str, ...]:
        """Where one constant cannot stand for this norm: at the "first" position, in the "tail" of the later ones."""
        ratios = {"first": (self.first, FIRST_LIMIT), "tail": (self.p99_9, TAIL_LIMIT)}
        return tuple(where for where, (scale, limit) in ratios.items() if not scale <= limit * self.median)


def measure(
    model: nn.Module,
    rows: Tensor,
    *,
    batch: int = 1,
    device: torch.device | None = None,
    like: nn.Module | None = None,
) -> dict[str, ScaleSpread]:
    """The spread of every norm's scale over rows of ids (R, T), norm by norm in the order they run.

    A norm may be plain, tapered at any gate or folded away: measured is the residual stream before its place. Every
    scale is kept, in float32: 4 N R T bytes. Nothing of the model changes.

    Args:
        batch: rows per forward pass.
        device: where the model lies; default: that of its parameters.
        like: a model with all of its norms, such as the base of a folded one, on any device (meta too): what a norm
            that is gone took for the scale.

    Raises:
        ValueError: there is no row, or a row is shorter than two tokens.
        UserError: a norm is gone and no `like` says what its scale was.
    """
    scales = scales_of(model, rows, batch=batch, device=device, like=like)
    return {name: spread_of(name, values, rows) for name, values in scales.items()}


@torch.no_grad()
def scales_of(
    model: nn.Module, rows: Tensor, *, batch: int, device: torch.device | None = None, like: nn.Module | None = None
) -> dict[str, Tensor]:
    """The scale of every token, (R, T) float32 on the CPU, by norm; arguments and errors as in `measure`."""
    if rows.ndim != 2 or len(rows) == 0 or rows.shape[1] < 2:
        raise ValueError(f"rows to measure are (R, T) with R >= 1 and T >= 2, got {tuple(rows.shape)}")
    device = device or next(model.parameters()).device
    found = {name: torch.full(rows.shape, torch.nan) for name in architecture_of(model).norms(model)}
    first = 0

    def keep(name: str, norm: nn.Module) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            h = args[0]
            s = norm_scale(norm, h.to(torch.promote_types(h.dtype, torch.float32)))  # (B, T, 1), or an OPT's (B T, 1)
            s = s.view(-1, rows.shape[1])
            found[name][first : first + len(s)] = s.float().cpu()

        return hook

    sources = {name: _source_of(name, model, like) for name in found}
    handles = [model.get_submodule(n).register_forward_pre_hook(keep(n, norm)) for n, norm in sources.items()]
    try:
        with evaluating(model):
            for first in tracked(range(0, len(rows), batch), "measuring scales", math.ceil(len(rows) / batch)):
                logits_of(model, rows[first : first + batch].to(torch.int64).to(device))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _source_of(name: str, model: nn.Module, like: nn.Module | None) -> nn.Module:
    """The module that says what the scale at `name` is."""
    module = model.get_submodule(name)
    if is_norm(module):
        return module
    if like is None:
        raise UserError(f"{name} is a {type(module).__name__}, no norm: give `like`, a model that still has its norms")
    return like.get_submodule(name)


def spread_of(norm: str, scales: Tensor, rows: Tensor) -> ScaleSpread:
    """Statistics of the scales (R, T) of the tokens `rows` (R, T)."""
    comparable = torch.where(scales.isfinite(), scales, torch.inf).double()
    later = comparable[:, 1:].flatten().sort().values.numpy()
    # A quantile among infinities is infinite; between a number and infinity, it is too.
    with np.errstate(invalid="ignore"):
        quantiles = {q: _finite_or_inf(np.quantile(later, q).item()) for q in QUANTILES}
    order = comparable[:, 1:].flatten().argsort(descending=True, stable=True)[:WORST].tolist()
    places = [(place // (rows.shape[1] - 1), 1 + place % (rows.shape[1] - 1)) for place in order]
    return ScaleSpread(
        norm=norm,
        tokens=scales.numel(),
        first=float(np.median(comparable[:, 0].numpy())),
        quantiles=quantiles,
        nonfinite=int((~scales.isfinite()).sum()),
        worst=tuple(Outlier(i, k, int(rows[i, k]), comparable[i, k].item()) for i, k in places),
    )


def _finite_or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value
