"""The distribution of each norm's per-token scale over text, which shows whether one constant c can replace it.

At g = 0, a token of k times the typical scale leaves a tapered norm k times too large. Trained models have such tokens,
at the first position and at delimiters.

Shapes: N norms, R rows, T tokens of a row.
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
WORST = 5  # how many tokens of the largest scales are listed for each norm

# Above these multiples of the norm's median scale, one constant cannot replace the scale.
FIRST_LIMIT = 5.0  # of the median at position 0
TAIL_LIMIT = 4.0  # of the 99.9th percentile at later positions


@dataclass(frozen=True)
class Outlier:
    """One token with an extreme scale.

    Attributes:
        row: index of its row.
        position: its position in the row, from 0.
        token: its id.
        scale: its scale s.
    """

    row: int
    position: int
    token: int
    scale: float


@dataclass(frozen=True)
class ScaleSpread:
    """The scales s of one norm's input over rows of text. Position 0 is kept apart.

    Attributes:
        norm: full name of the norm.
        tokens: number of tokens, R T.
        first: median over rows of s at position 0.
        quantiles: q -> the exact q quantile of s over positions >= 1, for each q in `QUANTILES`.
        nonfinite: number of tokens whose scale is not finite. They count as infinite.
        worst: the `WORST` tokens of the largest scales at positions >= 1, largest first.
    """

    norm: str
    tokens: int
    first: float
    quantiles: dict[float, float]
    nonfinite: int
    worst: tuple[Outlier, ...]

    @property
    def median(self) -> float:
        """The median scale at positions >= 1."""
        return self.quantiles[0.5]

    @property
    def p99_9(self) -> float:
        """The 99.9th percentile of the scale at positions >= 1."""
        return self.quantiles[0.999]

    @property
    def largest(self) -> float:
        """The largest scale at positions >= 1."""
        return self.worst[0].scale

    @property
    def misfits(self) -> tuple[str, ...]:
        """Where one constant cannot replace the scale: "first" is position 0, "tail" the largest scales after it."""
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
    """Measure the distribution of every norm's per-token scale over rows of text.

    A norm may be plain, tapered at any gate, or folded away: its scale is that of the residual stream at its place.
    All scales are held in float32, 4 N R T bytes. The model is unchanged.

    Args:
        model: a model of a class in `tapernorm.architectures.ARCHITECTURES`.
        rows: token ids (R, T), R >= 1 and T >= 2.
        batch: rows per forward pass.
        device: the device of the model. None takes that of its parameters.
        like: a model of the same shape with all its norms, such as the base of a folded model. It defines the scale
            of norms that were folded away. It may be on the meta device.

    Returns:
        The spread of each norm by its full name, in the order in which norms run.

    Raises:
        ValueError: `rows` has no row, or rows shorter than two tokens.
        UserError: a norm was folded away and `like` is None.
    """
    scales = scales_of(model, rows, batch=batch, device=device, like=like)
    return {name: spread_of(name, values, rows) for name, values in scales.items()}


@torch.no_grad()
def scales_of(
    model: nn.Module, rows: Tensor, *, batch: int, device: torch.device | None = None, like: nn.Module | None = None
) -> dict[str, Tensor]:
    """Return the scale of every token, (R, T) float32 on the CPU, by norm. Arguments and errors are `measure`'s."""
    if rows.ndim != 2 or len(rows) == 0 or rows.shape[1] < 2:
        raise ValueError(f"rows must be (R, T) with R >= 1 and T >= 2, got {tuple(rows.shape)}")
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
    """Return the norm that defines the scale at `name`: that of `model`, or else that of `like`."""
    module = model.get_submodule(name)
    if is_norm(module):
        return module
    if like is None:
        raise UserError(f"{name} is a {type(module).__name__} and no norm: give `like`, a model that has all its norms")
    return like.get_submodule(name)


def spread_of(norm: str, scales: Tensor, rows: Tensor) -> ScaleSpread:
    """Return the statistics of the scales (R, T) of the token ids `rows` (R, T)."""
    comparable = torch.where(scales.isfinite(), scales, torch.inf).double()
    later = comparable[:, 1:].flatten().sort().values.numpy()
    # NumPy interpolates between infinities, or towards one, as NaN; the quantile is infinite there.
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
