"""RMSNorm and LayerNorm, and their tapered forms: equations (1) and (2) of `taper`.

Shapes: h (..., D), gamma, gamma_t, beta (D,), gate value and c scalars.

`taper` changes the class of a plain norm in place. Its parameters, their names in the state dict, its hooks and its own
forward stay. `untaper` changes the class back.
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
    """The properties of a norm that its class determines. They are never guessed from its values."""

    centres: bool  # a LayerNorm subtracts the mean, an RMSNorm does not
    eps: str = "eps"  # the attribute that holds eps
    gain_offset: int = 0  # the gain gamma is gain_offset + weight


_LLAMA = Kind(centres=False, eps="variance_epsilon")
KINDS = {  # keyed by the full name of the class, so that transformers need not be imported
    "torch.nn.modules.normalization.RMSNorm": Kind(centres=False),
    "torch.nn.modules.normalization.LayerNorm": Kind(centres=True),
    "transformers.models.llama.modeling_llama.LlamaRMSNorm": _LLAMA,
    "transformers.models.mistral.modeling_mistral.MistralRMSNorm": _LLAMA,
    "transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm": _LLAMA,
    "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm": _LLAMA,
    "transformers.models.gemma.modeling_gemma.GemmaRMSNorm": Kind(centres=False, gain_offset=1),
}


def _kind(cls: type) -> Kind | None:
    """Return the kind of the first class in the method resolution order of `cls` that is in the table."""
    for base in cls.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in KINDS:
            return KINDS[name]
    return None


def _known_norms() -> str:
    return ", ".join(name.rsplit(".", 1)[-1] for name in KINDS)


def is_norm(module: nn.Module) -> bool:
    """Return whether `module` is a norm of a known kind, plain or tapered."""
    return _kind(type(module)) is not None


def kind_of(norm: nn.Module) -> Kind:
    """Return the kind of a norm, plain or tapered."""
    kind = _kind(type(norm))
    if kind is None:
        raise UserError(f"{type(norm).__name__} is not a known norm; known norms: {_known_norms()}")
    return kind


def gain_of(norm: nn.Module) -> Tensor:
    """Return gamma (D,) in float32 or wider: the weight, or 1 + weight for classes such as Gemma's."""
    weight, offset = norm.get_parameter("weight"), kind_of(norm).gain_offset
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return offset + wide if offset else wide


@dataclass(frozen=True)
class LinearForm:
    """A norm as a linear map v * coefficient + bias, to be folded into the map x -> x W + b that it feeds.

    v is h - mean(h) if `centre`, else h. Folding gives W' = diag(coefficient) W diag(output_scale) and
    b' = b + bias W. If `centre`, each column of W' loses its mean.
    """

    coefficient: Tensor  # (D,) float64
    centre: bool
    bias: Tensor | None  # (D,) float64: beta
    output_scale: Tensor | None = None  # (out,) float64, one factor for each output of W; None: all 1


class Form(Enum):
    """What a tapered norm computes. Each form is one graph under torch.compile."""

    OBSERVE = "observe"  # the standard norm, while statistics may be collected
    MIX = "mix"  # 0 < g < 1
    LINEAR = "linear"  # the fixed linear map, no per-token statistic


class Gate(WideBuffers):
    """The gate g that all tapered norms of a model share.

    It is a module: a buffer that several norms register would become several buffers in `.to()`.
    """

    value: Tensor  # ()

    def __init__(self, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones((), device=device), persistent=False)
        self.form = Form.OBSERVE
        self.observing = False  # whether training passes collect statistics: only inside Taper.observe()
        self.tokens: TokenMask | None = None  # which tokens of a pass count; None: all

    def set(self, value: float, form: Form | None = None) -> None:
        """Set g to `value`. Without `form`, the form follows from the value.

        Raises:
            UserError: g lies outside [0, 1].
        """
        if not 0 <= value <= 1:
            raise UserError(f"the gate must lie in [0, 1], got {value}: 1 is the standard norm, 0 the linear map")
        self.value.fill_(value)
        self.form = form or {1.0: Form.OBSERVE, 0.0: Form.LINEAR}.get(float(value), Form.MIX)


def centred(norm: nn.Module, h: Tensor) -> Tensor:
    """Return v (..., D): h - mean(h) for a LayerNorm, h itself for an RMSNorm."""
    return h - h.mean(-1, keepdim=True) if kind_of(norm).centres else h


def norm_scale(norm: nn.Module, h: Tensor) -> Tensor:
    """Return the per-token scale s (..., 1) that `norm` divides by: r(h) or sigma(h), including eps."""
    stated: Any = getattr(norm, kind_of(norm).eps)
    eps = stated if stated is not None else torch.finfo(h.dtype).eps
    return (centred(norm, h).square().mean(-1, keepdim=True) + eps).sqrt()


class TaperNorm(WideBuffers):
    """Equation (2) for any norm: g Norm(h) + (1 - g) (c v gamma_t (+ beta)), where v is h or h - mean(h).

    This mixin stands before the norm's own class, whose forward runs at g = 1.
    """

    weight: nn.Parameter  # gamma, or gamma - 1 in classes with gain_offset 1
    gamma_t: nn.Parameter  # gain of the linear branch, copied from gamma by the calibration
    c: Tensor  # () scale of the linear branch; NaN before the calibration
    gate: Gate
    statistics: RunningMean  # means of ||v gamma||^2 / s and ||v gamma||^2

    def coefficient(self) -> Tensor:
        """Return c * gamma_t (D,), the diagonal of the linear map."""
        return self.c * self.gamma_t

    def linear_form(self, consumer: nn.Module | None = None) -> LinearForm:
        """Return the g = 0 map in float64, for folding. It is the same for every `consumer`."""
        coefficient = self.c.double() * self.gamma_t.detach().double()
        beta: Any = getattr(self, "bias", None)
        return LinearForm(coefficient, kind_of(self).centres, None if beta is None else beta.detach().double())

    def linear(self, h: Tensor) -> Tensor:
        """Apply the g = 0 map to h (..., D): c v gamma_t (+ beta)."""
        scaled = centred(self, h) * self.coefficient().to(h.dtype)
        beta: Any = getattr(self, "bias", None)
        return scaled if beta is None else scaled + beta.to(h.dtype)

    def forward(self, h: Tensor) -> Tensor:
        """Apply equation (2) to h (..., D)."""
        gate = self.gate
        if gate.form is Form.LINEAR:
            return self.linear(h)
        standard = super().forward(h)
        if gate.form is Form.OBSERVE:
            if gate.observing and self.training:
                self._collect(h.detach())
            return standard
        wide = torch.promote_types(h.dtype, torch.float32)  # bfloat16 would round a gate near 1 to 1
        return torch.lerp(self.linear(h).to(wide), standard.to(wide), gate.value.to(wide)).to(standard.dtype)

    def counted(self, h: Tensor) -> Tensor | None:
        """Return which tokens of h (..., D) count, (..., 1) bool. None means all of them."""
        return None if self.gate.tokens is None else self.gate.tokens.counted(h)

    @torch.no_grad()
    def _collect(self, h: Tensor) -> None:
        counted = self.counted(h)
        if counted is not None and in_backward():  # recomputed by activation checkpointing: a later pass set the mask
            return
        self._add(h.to(self.statistics.sums.dtype), counted)

    def _add(self, h: Tensor, counted: Tensor | None) -> None:
        """Add the counted tokens of h (..., D) to the two means of equation (4)."""
        energy = (centred(self, h) * gain_of(self)).square().sum(-1, keepdim=True)  # ||v gamma||^2, (..., 1)
        sums = torch.stack([sum_over(energy / norm_scale(self, h), counted), sum_over(energy, counted)])
        self.statistics.add(sums, number_of(energy, counted))

    def best_c(self) -> Tensor:
        """Return c of equation (4), a scalar, from the statistics.

        Raises:
            UserError: there are no statistics, or they are not finite.
        """
        c = least_squares_c(self.statistics.value())
        if not torch.isfinite(c):
            raise UserError(
                f"cannot calibrate a norm after {int(self.statistics.updates)} updates of its statistics "
                f"(c* = {c.item()}): train at g = 1 inside Taper.observe() before the taper starts"
            )
        return c

    @torch.no_grad()
    def calibrate(self, c: Tensor) -> None:
        """Set the constant to `c` and copy gamma to gamma_t."""
        self.c.copy_(c)
        self.gamma_t.copy_(gain_of(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the class of the plain norm: `_tapered_class` creates some tapered classes at run time."""
        _, _, *state = super().__reduce_ex__(protocol)
        return (_unset, (_plain_class(self),), *state)


class TaperRMSNorm(TaperNorm, RMSNorm):
    """g * RMSNorm(h) + (1 - g) * c * h * gamma_t."""


class TaperLayerNorm(TaperNorm, LayerNorm):
    """g * LayerNorm(h) + (1 - g) * (c * (h - mean(h)) * gamma_t + beta)."""


class FixedScale(nn.Module):
    """The g = 0 map as a module: (h or h - mean(h)) * weight (+ bias). An unfused fold puts it in a norm's place.

    Args:
        width: D.
        centre: whether to subtract the mean, as a LayerNorm does.
        bias: whether to add a bias (D,).
    """

    def __init__(self, width: int, *, centre: bool, bias: bool) -> None:
        super().__init__()
        self.centre = centre
        self.weight = nn.Parameter(torch.ones(width))  # c * gamma_t
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, h: Tensor) -> Tensor:
        """Apply the map to h (..., D)."""
        if self.centre:
            h = h - h.mean(-1, keepdim=True)
        scaled = h * self.weight
        return scaled if self.bias is None else scaled + self.bias


_TAPERED: dict[type[nn.Module], type[TaperNorm]] = {RMSNorm: TaperRMSNorm, LayerNorm: TaperLayerNorm}


def _tapered_class(stock: type[nn.Module]) -> type[TaperNorm]:
    """Return the tapered form of a norm's class. Classes of transformers get theirs on first use."""
    if stock not in _TAPERED:
        _TAPERED[stock] = type(f"Taper{stock.__name__}", (TaperNorm, stock), {"__doc__": TaperNorm.__doc__})
    return _TAPERED[stock]


def _unset(stock: type[nn.Module]) -> TaperNorm:
    """Return a tapered norm without attributes, for unpickling."""
    kind = _tapered_class(stock)
    return kind.__new__(kind)


def _plain_class(norm: TaperNorm) -> type[nn.Module]:
    return next(stock for stock, tapered in _TAPERED.items() if isinstance(norm, tapered))


def require_taperable(norm: nn.Module) -> None:
    """Raise UserError if `taper` cannot convert `norm`.

    It cannot for an unknown class, a norm without gain, a norm over several axes, or one whose forward was replaced.
    """
    stock = type(norm)
    if f"{stock.__module__}.{stock.__qualname__}" not in KINDS:  # the exact class: a subclass may compute anything
        raise UserError(f"cannot taper a {stock.__name__}; known norms: {_known_norms()}")
    gamma = getattr(norm, "weight", None)
    if not isinstance(gamma, nn.Parameter) or gamma.ndim != 1:
        raise UserError(f"cannot taper {norm}: it needs a gain (weight) over the last axis alone")
    if "forward" in norm.__dict__:
        raise UserError(
            f"cannot taper {norm}: its forward was replaced by a kernel from the hub or by the hooks of a device_map. "
            "Load the model without them"
        )


def taper(norm: nn.Module, gate: Gate, *, ema_rate: float) -> TaperNorm:
    """Change `norm` into its tapered form, in place, with gate `gate`, and return it.

    Raises:
        UserError: `norm` has no tapered form.
        ValueError: `ema_rate` lies outside (0, 1].
    """
    require_taperable(norm)
    gamma = norm.get_parameter("weight")
    gain = gain_of(norm).detach()
    statistics = RunningMean(2, ema_rate, dtype=gamma.dtype, device=gamma.device)  # may raise ValueError
    norm.__class__ = _tapered_class(type(norm))
    assert isinstance(norm, TaperNorm)
    norm.gate = gate
    norm.gamma_t = nn.Parameter(gain.to(gamma.dtype, copy=True))
    norm.register_buffer("c", torch.full((), torch.nan, dtype=gain.dtype, device=gamma.device))
    norm.statistics = statistics
    return norm


def untaper(norm: TaperNorm) -> None:
    """Change `norm` back into the plain norm, in place, with its current gamma and beta."""
    plain: Any = norm
    for member in ("gate", "gamma_t", "c", "statistics"):
        delattr(plain, member)
    plain.__class__ = _plain_class(norm)
