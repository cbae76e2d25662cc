"""RMSNorm and LayerNorm, and their tapered forms: equations (1) and (2) of `taper`.

Shapes: h (..., D), gamma, gamma_t, beta (D,), gate value and c scalars.

`taper` changes the class of a plain norm in place, so that its parameters, their names in the state dict, its hooks and
its own forward stay what they were; `untaper` changes it back.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import LayerNorm as LayerNorm
from torch.nn import RMSNorm as RMSNorm

from .calibrate import RunningMean, least_squares_c
from .token_mask import TokenMask, in_backward, number_of, sum_over
from .util.errors import UserError
from .util.wide_buffers import WideBuffers


@dataclass(frozen=True)
class Kind:
    """What the class of a norm says of it; the values of a norm are never asked."""

    centres: bool  # a LayerNorm subtracts the mean, an RMSNorm does not
    eps: str = "eps"  # the attribute that holds eps
    gain_offset: int = 0  # the gain is this + weight


_LLAMA = Kind(centres=False, eps="variance_epsilon")
KINDS = {  # by the full name of the class: nothing of transformers is imported for it
    "torch.nn.modules.normalization.RMSNorm": Kind(centres=False),
    "torch.nn.modules.normalization.LayerNorm": Kind(centres=True),
    "transformers.models.llama.modeling_llama.LlamaRMSNorm": _LLAMA,
    "transformers.models.mistral.modeling_mistral.MistralRMSNorm": _LLAMA,
    "transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm": _LLAMA,
    "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm": _LLAMA,
    "transformers.models.gemma.modeling_gemma.GemmaRMSNorm": Kind(centres=False, gain_offset=1),
}


def _kind(cls: type) -> Kind | None:
    """The kind of the nearest class above `cls`, itself included, that is in the table."""
    for base in cls.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in KINDS:
            return KINDS[name]
    return None


def _known_norms() -> str:
    return ", ".join(name.rsplit(".", 1)[-1] for name in KINDS)


def is_norm(module: nn.Module) -> bool:
    """Whether this is a norm of a known kind, plain or tapered."""
    return _kind(type(module)) is not None


def kind_of(norm: nn.Module) -> Kind:
    """The kind of a norm, plain or tapered."""
    kind = _kind(type(norm))
    if kind is None:
        raise UserError(f"a {type(norm).__name__} is no norm of a known kind; known norms: {_known_norms()}")
    return kind


def gain_of(norm: nn.Module) -> Tensor:
    """gamma, (D,), in float32 or wider: the weight, or 1 + weight where the class says so."""
    weight, offset = norm.get_parameter("weight"), kind_of(norm).gain_offset
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return offset + wide if offset else wide


@dataclass(frozen=True)
class LinearForm:
    """A norm that has become the map (h or h - mean(h)) * coefficient + bias, for the map x -> x W + b behind it.

    W' = diag(coefficient) W diag(output_scale), less its mean over the inputs where `centre`; b' = b + bias W.
    """

    coefficient: Tensor  # (D,) float64
    centre: bool
    bias: Tensor | None  # (D,) float64: beta
    output_scale: Tensor | None = None  # (out,) float64, of each output of W; None: 1


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
        self.tokens: TokenMask | None = None  # which tokens of a pass count; None: all of them

    def set(self, value: float, form: Form | None = None) -> None:
        """Write g; its form follows from the value unless given.

        Raises:
            UserError: g outside [0, 1].
        """
        if not 0 <= value <= 1:
            raise UserError(f"the gate must lie in [0, 1], got {value}: 1 is the standard norm, 0 the linear map")
        self.value.fill_(value)
        self.form = form or {1.0: Form.OBSERVE, 0.0: Form.LINEAR}.get(float(value), Form.MIX)


def centred(norm: nn.Module, h: Tensor) -> Tensor:
    """h - mean(h) for a LayerNorm, h itself for an RMSNorm."""
    return h - h.mean(-1, keepdim=True) if kind_of(norm).centres else h


def norm_scale(norm: nn.Module, h: Tensor) -> Tensor:
    """The per-token scale that `norm` divides by, (..., 1): r(h) or sigma(h), eps included."""
    stated: Any = getattr(norm, kind_of(norm).eps)
    eps = stated if stated is not None else torch.finfo(h.dtype).eps
    return (centred(norm, h).square().mean(-1, keepdim=True) + eps).sqrt()


class TaperNorm(WideBuffers):
    """Equation (2) for any norm: g Norm(h) + (1 - g) (c v gamma_t (+ beta)), v = h or h - mean(h).

    Mixed in before the norm's own class, whose forward runs at g = 1.
    """

    weight: nn.Parameter  # gamma, or gamma - 1 where the class says so
    gamma_t: nn.Parameter  # gain of the linear branch, copied from gamma at the taper start
    c: Tensor  # () scale of the linear branch; NaN until calibrated
    gate: Gate
    statistics: RunningMean  # means of ||v||^2 / s and ||v||^2, v = centred h * gamma

    def coefficient(self) -> Tensor:
        """c * gamma_t, (D,): the diagonal of the linear map."""
        return self.c * self.gamma_t

    def linear_form(self, consumer: nn.Module | None = None) -> LinearForm:
        """The g = 0 map in float64, for folding; the same for every `consumer`."""
        coefficient = self.c.double() * self.gamma_t.detach().double()
        beta: Any = getattr(self, "bias", None)
        return LinearForm(coefficient, kind_of(self).centres, None if beta is None else beta.detach().double())

    def linear(self, h: Tensor) -> Tensor:
        """The g = 0 map of h (..., D): c v gamma_t (+ beta)."""
        scaled = centred(self, h) * self.coefficient().to(h.dtype)
        beta: Any = getattr(self, "bias", None)
        return scaled if beta is None else scaled + beta.to(h.dtype)

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
        # (1 - g) linear + g standard
        return torch.lerp(self.linear(h).to(wide), standard.to(wide), gate.value.to(wide)).to(standard.dtype)

    def counted(self, h: Tensor) -> Tensor | None:
        """Which tokens of h (..., D) count, (..., 1) bool; None: all of them do."""
        return None if self.gate.tokens is None else self.gate.tokens.counted(h)

    @torch.no_grad()
    def _collect(self, h: Tensor) -> None:
        counted = self.counted(h)
        if counted is not None and in_backward():  # the mask may be that of a later pass
            return
        self._add(h.to(self.statistics.sums.dtype), counted)

    def _add(self, h: Tensor, counted: Tensor | None) -> None:
        """Add the tokens of h (..., D) that count to the statistics: the two means of equation (4)."""
        energy = (centred(self, h) * gain_of(self)).square().sum(-1, keepdim=True)  # (..., 1) of ||v||^2
        sums = torch.stack([sum_over(energy / norm_scale(self, h), counted), sum_over(energy, counted)])
        self.statistics.add(sums, number_of(energy, counted))

    def best_c(self) -> Tensor:
        """c of equation (4), a scalar, from the statistics."""
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
        self.gamma_t.copy_(gain_of(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the plain norm's class: a tapered class may not exist before `_tapered_class` makes it."""
        _, _, *state = super().__reduce_ex__(protocol)
        return (_unset, (_plain_class(self),), *state)


class TaperRMSNorm(TaperNorm, RMSNorm):
    """g * RMSNorm(h) + (1 - g) * c * h * gamma_t."""


class TaperLayerNorm(TaperNorm, LayerNorm):
    """g * LayerNorm(h) + (1 - g) * (c * (h - mean(h)) * gamma_t + beta)."""


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


def _tapered_class(stock: type[nn.Module]) -> type[TaperNorm]:
    """The tapered form of a norm's class; made on first use for those of transformers."""
    if stock not in _TAPERED:
        _TAPERED[stock] = type(f"Taper{stock.__name__}", (TaperNorm, stock), {"__doc__": TaperNorm.__doc__})
    return _TAPERED[stock]


def _unset(stock: type[nn.Module]) -> TaperNorm:
    """A tapered norm without members, for a pickle to fill."""
    kind = _tapered_class(stock)
    return kind.__new__(kind)


def _plain_class(norm: TaperNorm) -> type[nn.Module]:
    return next(stock for stock, tapered in _TAPERED.items() if isinstance(norm, tapered))


def require_taperable(norm: nn.Module) -> None:
    """Raise UserError where `taper` has no form for `norm`.

    That is: an unknown class, no gain, more than one axis, or a forward of its own in the place of the class's.
    """
    stock = type(norm)
    if f"{stock.__module__}.{stock.__qualname__}" not in KINDS:  # exactly: a subclass may compute anything
        raise UserError(f"cannot taper a {stock.__name__}; known norms: {_known_norms()}")
    gamma = getattr(norm, "weight", None)
    if not isinstance(gamma, nn.Parameter) or gamma.ndim != 1:
        raise UserError(f"cannot taper {norm}: it needs a gain over exactly one axis, the last")
    if "forward" in norm.__dict__:
        raise UserError(
            f"cannot taper {norm}: something replaced its forward (a kernel from the hub, or the hooks of a device "
            "map), which would hide the tapered one; load the model without"
        )


def taper(norm: nn.Module, gate: Gate, *, ema_rate: float) -> TaperNorm:
    """Turn `norm` into its tapered form in place, governed by `gate`, and return it."""
    require_taperable(norm)
    gamma = norm.get_parameter("weight")
    gain = gain_of(norm).detach()
    statistics = RunningMean(2, ema_rate, dtype=gamma.dtype, device=gamma.device)  # refuses a rate before any change
    norm.__class__ = _tapered_class(type(norm))
    assert isinstance(norm, TaperNorm)
    norm.gate = gate
    norm.gamma_t = nn.Parameter(gain.to(gamma.dtype, copy=True))
    norm.register_buffer("c", torch.full((), torch.nan, dtype=gain.dtype, device=gamma.device))
    norm.statistics = statistics
    return norm


def untaper(norm: TaperNorm) -> None:
    """Turn `norm` back into the plain norm that it was, in place, with the gamma and beta that it has now."""
    plain: Any = norm
    for member in ("gate", "gamma_t", "c", "statistics"):
        delattr(plain, member)
    plain.__class__ = _plain_class(norm)
