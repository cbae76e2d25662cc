"""RMSNorm and LayerNorm, and their tapered forms (method.md sections 1 and 2).

Shapes: h (..., D), gamma, gamma_t, beta (D,), gate value and c scalars.

The plain norms are PyTorch's own. A tapered norm *is* the plain norm with a few members more: `taper`
changes the class of an existing module in place, so its parameters, their names in the state dict, its
hooks and its own forward stay what they were.
"""

from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import LayerNorm, RMSNorm

from .buffers import WideBuffers
from .calibrate import RunningMean, least_squares_c
from .errors import UserError

__all__ = [
    "FixedScale",
    "Form",
    "Gate",
    "LayerNorm",
    "RMSNorm",
    "TaperLayerNorm",
    "TaperNorm",
    "TaperRMSNorm",
    "norm_scale",
    "taper",
]


class Form(Enum):
    """What a tapered norm computes; each is one graph under torch.compile."""

    OBSERVE = "observe"  # the standard norm, while statistics may be collected
    MIX = "mix"  # 0 < g < 1
    LINEAR = "linear"  # the fixed linear map, no per-token statistic


class Gate(WideBuffers):
    """The one gate g that all tapered norms of a model share.

    A module, because a buffer registered in several norms would part at `.to()`; a shared module does not.
    """

    value: Tensor  # ()

    def __init__(self, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones((), device=device), persistent=False)
        self.form = Form.OBSERVE
        self.observing = False  # statistics are collected: training passes inside Taper.observe() alone

    def set(self, value: float, form: Form | None = None) -> None:
        """Write g; its form follows from the value unless given.

        Raises:
            ValueError: g outside [0, 1].
        """
        if not 0 <= value <= 1:
            raise ValueError(f"the gate must lie in [0, 1], got {value}")
        self.value.fill_(value)
        self.form = form or {1.0: Form.OBSERVE, 0.0: Form.LINEAR}.get(float(value), Form.MIX)


def centred(norm: nn.Module, h: Tensor) -> Tensor:
    """h - mean(h) for a LayerNorm, h itself for an RMSNorm."""
    return h - h.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else h


def norm_scale(norm: nn.Module, h: Tensor) -> Tensor:
    """The per-token scale that `norm` divides by, (..., 1): r(h) or sigma(h), eps included."""
    eps: Any = norm.eps if norm.eps is not None else torch.finfo(h.dtype).eps
    return (centred(norm, h).square().mean(-1, keepdim=True) + eps).sqrt()


class TaperNorm(WideBuffers):
    """What a tapered RMSNorm and LayerNorm have in common; mixed in before the norm's own class."""

    weight: nn.Parameter  # gamma
    gamma_t: nn.Parameter  # gain of the linear branch, copied from gamma at the taper start
    c: Tensor  # () scale of the linear branch; NaN until calibrated
    gate: Gate
    statistics: RunningMean  # means of ||v||^2 / s and ||v||^2, v = centred h * gamma

    def coefficient(self) -> Tensor:
        """c * gamma_t, (D,): the diagonal of the linear map."""
        return self.c * self.gamma_t

    def coefficient64(self) -> Tensor:
        """c * gamma_t in float64, (D,), for folding."""
        return self.c.double() * self.gamma_t.double()

    def linear(self, h: Tensor) -> Tensor:
        """The g = 0 map of h (..., D): c * centred(h) * gamma_t (+ beta)."""
        raise TypeError("TaperNorm is a mixin: use TaperRMSNorm or TaperLayerNorm")

    def forward(self, h: Tensor) -> Tensor:
        gate = self.gate
        if gate.form is Form.LINEAR:
            return self.linear(h)
        standard = super().forward(h)
        if gate.form is Form.OBSERVE:
            if gate.observing and self.training:
                self._collect(h.detach())
            return standard
        wide = torch.promote_types(h.dtype, torch.float32)  # a bf16 gate would round to 1 well before it is
        return torch.lerp(self.linear(h).to(wide), standard.to(wide), gate.value.to(wide)).to(standard.dtype)

    @torch.no_grad()
    def _collect(self, h: Tensor) -> None:
        h = h.to(self.statistics.sums.dtype)
        energy = (centred(self, h) * self.weight).square().sum(-1, keepdim=True)  # (..., 1) of ||v||^2
        sums = torch.stack([(energy / norm_scale(self, h)).sum(), energy.sum()])
        self.statistics.add(sums, energy.numel())

    def best_c(self) -> Tensor:
        """c*, a scalar, from the statistics (section 4).

        Raises:
            UserError: none were collected, or they are not finite.
        """
        c = least_squares_c(self.statistics.value())
        if not torch.isfinite(c):
            raise UserError(
                f"cannot calibrate after {int(self.statistics.updates)} updates of its statistics (c* = {c.item()}): "
                "train at g = 1 inside Taper.observe() before the taper starts"
            )
        return c

    @torch.no_grad()
    def calibrate(self, c: Tensor) -> None:
        """c <- c*, gamma_t <- gamma."""
        self.c.copy_(c)
        self.gamma_t.copy_(self.weight)


class TaperRMSNorm(TaperNorm, RMSNorm):
    """g * RMSNorm(h) + (1 - g) * c * h * gamma_t."""

    def linear(self, h: Tensor) -> Tensor:
        return h * self.coefficient().to(h.dtype)


class TaperLayerNorm(TaperNorm, LayerNorm):
    """g * LayerNorm(h) + (1 - g) * (c * (h - mean(h)) * gamma_t + beta)."""

    def linear(self, h: Tensor) -> Tensor:
        scaled = centred(self, h) * self.coefficient().to(h.dtype)
        return scaled if self.bias is None else scaled + self.bias.to(h.dtype)


class FixedScale(nn.Module):
    """The g = 0 map as a module of its own: (h or h - mean(h)) * weight (+ bias); what an unfused fold leaves.

    Args:
        width: D.
        centre: subtract the mean, as a LayerNorm does.
        bias: add a bias.
    """

    def __init__(self, width: int, *, centre: bool, bias: bool) -> None:
        super().__init__()
        self.centre = centre
        self.weight = nn.Parameter(torch.ones(width))  # c * gamma_t
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, h: Tensor) -> Tensor:
        if self.centre:
            h = h - h.mean(-1, keepdim=True)
        scaled = h * self.weight
        return scaled if self.bias is None else scaled + self.bias


_TAPERED: dict[type[nn.Module], type[TaperNorm]] = {RMSNorm: TaperRMSNorm, LayerNorm: TaperLayerNorm}


def taper(norm: nn.Module, gate: Gate, *, ema_rate: float) -> TaperNorm:
    """Turn `norm` into its tapered form in place, governed by `gate`, and return it.

    Raises:
        UserError: the class of the norm is unknown, it has no gain, or it normalises more than one axis.
    """
    tapered = _TAPERED.get(type(norm))
    if tapered is None:
        known = ", ".join(t.__name__ for t in _TAPERED)
        raise UserError(f"cannot taper a {type(norm).__name__}; known norms: {known}")
    gamma = norm.weight
    if not isinstance(gamma, nn.Parameter) or gamma.ndim != 1:
        raise UserError(f"cannot taper {norm}: it needs a gain over exactly one axis, the last")
    norm.__class__ = tapered
    assert isinstance(norm, TaperNorm)
    wide = torch.promote_types(gamma.dtype, torch.float32)
    norm.gate = gate
    norm.gamma_t = nn.Parameter(gamma.detach().clone())
    norm.register_buffer("c", torch.full((), torch.nan, dtype=wide, device=gamma.device))
    norm.statistics = RunningMean(2, ema_rate, dtype=gamma.dtype, device=gamma.device)
    return norm
