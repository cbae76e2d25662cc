"""Folding: at g = 0 a tapered norm is a linear map, and disappears into the next one (method.md section 6).

Row vectors: x -> x W + b. An nn.Linear stores W transposed, as `weight` (out, in).
"""

import copy
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .arch import Architecture, architecture_of
from .audit import require_foldable
from .errors import UserError
from .norms import FixedScale, Form, TaperLayerNorm, TaperNorm
from .rng import generator
from .taper import forget_taper

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class FoldedNorm:
    """One norm that is gone."""

    name: str
    consumers: tuple[str, ...]  # the linear maps that took it over; an unfused one is a FixedScale before them
    c: float
    gamma_t_min: float
    gamma_t_max: float


@dataclass(frozen=True)
class FoldReport:
    """What `fold` did, and how far the logits moved."""

    fused: bool
    norms: tuple[FoldedNorm, ...]
    head_untied: bool
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    largest_logit_difference: float  # against the unfolded model at g = 0, on a probe batch, in the model's dtype

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def fold(model: M, *, fused: bool = True) -> tuple[M, FoldReport]:
    """A copy of `model` without its tapered norms, computing the same function; `model` stays as it is.

    fused: W' = c diag(gamma_t) W for an RMSNorm, W' = c (I - 11^T/d) diag(gamma_t) W and b' = b + beta W for a
    LayerNorm, in float64 and cast once; no module is left of the norm. Otherwise the map stays as an explicit
    `FixedScale`. A tied head is untied before the final norm goes into it: the embedding stays as it is.

    Raises:
        UserError: nothing tapered, folded already, gate not 0, not calibrated, or a norm that cannot be folded
            because of what it feeds; the message says which and what to do.
    """
    arch = architecture_of(model)
    norms = _foldable_norms(model, arch)
    folded = copy.deepcopy(model).eval()  # all passes are its own: one of `model` would move the taper's probe
    forget_taper(folded)
    tokens = _probe_tokens(folded)
    if fused:
        require_foldable(folded, {name: arch.consumers(name) for name in norms}, tokens)
    logits = folded(tokens)
    untied = fused and arch.final in norms and _has_tied_head(folded, arch)
    for name, norm in norms.items():
        if fused:
            for consumer in arch.consumers(name):
                layer = folded.get_submodule(consumer)
                assert isinstance(layer, nn.Linear)
                _fold_into(layer, norm)
        folded.set_submodule(name, nn.Identity() if fused else _fixed_scale(norm))
    if untied:
        config: Any = folded.config
        folded.config = config.model_copy(update={"tie_head": False})
    moved = (folded(tokens) - logits).abs().max().item()
    report = _report(model, folded, norms, arch, fused=fused, untied=untied, moved=moved)
    return folded.train(model.training), report


def _foldable_norms(model: nn.Module, arch: Architecture) -> dict[str, TaperNorm]:
    sites = {name: model.get_submodule(name) for name in [*arch.internal_norms(model), arch.final]}
    norms = {name: norm for name, norm in sites.items() if isinstance(norm, TaperNorm)}
    if not norms:
        if any(isinstance(norm, nn.Identity | FixedScale) for norm in sites.values()):
            raise UserError("this model is folded already: fold the tapered model that it came from")
        raise UserError("no norm of this model is tapered: attach(model), train it through a taper, then fold it")
    for name, norm in norms.items():
        if bool(norm.c.isnan()):
            raise UserError(f"{name} is not calibrated: train at g = 1 inside Taper.observe(), then calibrate()")
        if norm.gate.form is not Form.LINEAR:
            raise UserError(
                f"the gate is {norm.gate.value.item():g} and folding needs 0: Taper.set_gate(0), or train to the end"
            )
    return norms


def _has_tied_head(model: nn.Module, arch: Architecture) -> bool:
    """Whether the output head shares its weight; folding into it will give it one of its own."""
    head = model.get_submodule(arch.head)
    return any(m is not head and getattr(m, "weight", None) is head.weight for m in model.modules())


def _fold_into(layer: nn.Linear, norm: TaperNorm) -> None:
    """Replace layer(norm(h)) by layer(h); float64 inside, cast once. What shared the old weight keeps it."""
    weight = layer.weight.double()  # (out, in)
    scaled = weight * norm.coefficient64()
    if isinstance(norm, TaperLayerNorm):
        scaled = scaled - scaled.mean(dim=1, keepdim=True)  # (I - 11^T/d): every output's mean over the inputs
        if norm.bias is not None:
            _add_to_bias(layer, weight @ norm.bias.double())
    layer.weight = _like(layer.weight, scaled)


def _add_to_bias(layer: nn.Linear, shift: Tensor) -> None:
    layer.bias = _like(layer.weight, shift if layer.bias is None else layer.bias.double() + shift)


def _like(parameter: Tensor, value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(parameter.dtype), requires_grad=parameter.requires_grad)


def _fixed_scale(norm: TaperNorm) -> FixedScale:
    bias = getattr(norm, "bias", None)
    centre = isinstance(norm, TaperLayerNorm)
    scale = FixedScale(len(norm.weight), centre=centre, bias=bias is not None).to(norm.weight)
    scale.weight.copy_(norm.coefficient64())
    if bias is not None and scale.bias is not None:
        scale.bias.copy_(bias)
    return scale.requires_grad_(norm.gamma_t.requires_grad)


def _probe_tokens(model: nn.Module) -> Tensor:
    """A few random token ids (2, T) that any such model accepts."""
    config: Any = model.config
    device = next(model.parameters()).device
    length = min(config.context, 32)
    return torch.randint(config.vocab_size, (2, length), generator=generator(0, "fold/probe")).to(device)


def _report(
    model: nn.Module,
    folded: nn.Module,
    norms: dict[str, TaperNorm],
    arch: Architecture,
    *,
    fused: bool,
    untied: bool,
    moved: float,
) -> FoldReport:
    def size(m: nn.Module) -> tuple[int, int]:
        return sum(p.numel() for p in m.parameters()), sum(p.nbytes for p in m.parameters())

    (parameters_before, bytes_before), (parameters_after, bytes_after) = size(model), size(folded)
    entries = [
        FoldedNorm(
            name=name,
            consumers=tuple(arch.consumers(name)),
            c=norm.c.item(),
            gamma_t_min=norm.gamma_t.min().item(),
            gamma_t_max=norm.gamma_t.max().item(),
        )
        for name, norm in norms.items()
    ]
    return FoldReport(
        fused=fused,
        norms=tuple(entries),
        head_untied=untied,
        parameters_before=parameters_before,
        parameters_after=parameters_after,
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        largest_logit_difference=moved,
    )
