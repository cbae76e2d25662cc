"""Folding: at g = 0 a tapered norm is a linear map, and disappears into the next one: equations (6), (7) of `taper`.

Row vectors: x -> x W + b, W (in, out) whatever way round a layer stores it.
"""

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .architectures import Architecture, architecture_of, context_of, has_tied_head, logits_of, untie, vocabulary_of
from .attach_checks import require_apart, require_own_weights
from .checkpoints.save_guard import guard_saving
from .fold_check import require_foldable
from .linear_maps import make_plain, replace, weight64
from .norms import FixedScale, Form, LinearForm, TaperNorm, kind_of, norm_scale
from .taper import forget_taper
from .util.errors import UserError
from .util.rng import generator

M = TypeVar("M", bound=nn.Module)
MEAN_TO_SIGMA = 100.0  # a hundred units of float32 rounding: 1e-5, what a fold in float32 is good for


@dataclass(frozen=True)
class FoldedNorm:
    """One norm that is gone."""

    name: str
    consumers: tuple[str, ...]  # the linear maps that took it over; an unfused one is a FixedScale before them
    c: float | None  # its mean where features have one each; None: FakeLN has a sigma_bar instead
    coefficient_min: float  # of c * gamma_t, or of gamma / sigma_bar
    coefficient_max: float
    mean_to_sigma: float | None  # largest |mean| / sigma of its input in the probe pass; None: it does not centre


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
    largest_logit: float  # of the unfolded model there: what the difference is to be held against

    @property
    def warnings(self) -> tuple[str, ...]:
        """Where a fold in float32 costs digits.

        A folded centring subtracts nothing: the mean of h cancels in the sum h W', to within |mean| / sigma units of
        rounding.
        """
        if not self.fused:
            return ()
        return tuple(
            f"{norm.name} reads tokens whose mean is up to {norm.mean_to_sigma:.2g} times their deviation: centring "
            "loses digits by that factor in any form, and a few times more when folded (in float32 about "
            f"{norm.mean_to_sigma * torch.finfo(torch.float32).eps:.0e} of the output); compare losses, or fold with "
            "fused=False"
            for norm in self.norms
            if norm.mean_to_sigma is not None and norm.mean_to_sigma > MEAN_TO_SIGMA
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "warnings": self.warnings}


@torch.no_grad()
def fold(model: M, *, fused: bool = True) -> tuple[M, FoldReport]:
    """A copy of `model` without its tapered norms, computing the same function; `model` stays as it is.

        W' = c diag(gamma_t) W                              (6), RMSNorm
        W' = c (I - 11^T/d) diag(gamma_t) W                 (6), LayerNorm
        b' = b + beta W                                     (7), LayerNorm

    In float64, and cast once. A tied head is untied before the final norm goes into it: the embedding stays as it is.
    FakeLN's norms fold alike, with 1 / sigma_bar for c and gamma for gamma_t.

    Args:
        fused: into the linear maps, which leaves no module of the norm; False: the map stays, as a `FixedScale`.

    Raises:
        UserError: nothing tapered, folded already, gate not 0, not calibrated, or a norm that cannot be folded
            because of what it feeds; the message says which and what to do. A wrapper, such as a PeftModel, is no
            model to fold.
    """
    arch = architecture_of(model)
    norms = _foldable_norms(model, arch)
    require_apart(model, norms)
    require_own_weights(model, [consumer for name in norms for consumer in arch.consumers(name)] if fused else [])
    folded = copy.deepcopy(model).eval()  # all passes are its own: one of `model` would move the taper's probe
    forget_taper(folded)
    for name in norms:
        _refuse_hooks(name, folded.get_submodule(name))
    tokens = _probe_tokens(folded)
    if fused:
        require_foldable(folded, {name: arch.consumers(name) for name in norms}, tokens)
    logits, ratios = _probe(folded, norms, tokens)
    untied = fused and arch.final in norms and has_tied_head(folded)
    for name, norm in norms.items():
        layers = [folded.get_submodule(consumer) for consumer in arch.consumers(name)]
        if fused:
            for layer in layers:
                _fold_into(layer, _form(norm, layer))
        folded.set_submodule(name, nn.Identity() if fused else _fixed_scale(name, norm, layers))
        for layer in layers:
            make_plain(layer)
    if untied:
        untie(folded)
    guard_saving(folded)
    (parameters_before, bytes_before), (parameters_after, bytes_after) = _size(model), _size(folded)
    report = FoldReport(
        fused=fused,
        norms=tuple(_entry(name, norm, ratios.get(name), model, arch) for name, norm in norms.items()),
        head_untied=untied,
        parameters_before=parameters_before,
        parameters_after=parameters_after,
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        largest_logit_difference=(logits_of(folded, tokens) - logits).abs().max().item(),
        largest_logit=logits.abs().max().item(),
    )
    return folded.train(model.training), report


def is_folded(model: nn.Module) -> bool:
    """Whether `model` is what `fold` leaves, fused or not."""
    sites = (model.get_submodule(name) for name in architecture_of(model).norms(model))
    return any(isinstance(norm, nn.Identity | FixedScale) for norm in sites)


def _foldable_norms(model: nn.Module, arch: Architecture) -> dict[str, nn.Module]:
    sites = {name: model.get_submodule(name) for name in arch.norms(model)}
    norms = {name: norm for name, norm in sites.items() if hasattr(norm, "linear_form")}
    if not norms:
        if is_folded(model):
            raise UserError("this model is folded already: fold the tapered model that it came from")
        raise UserError("no norm of this model is tapered: attach(model), train it through a taper, then fold it")
    for name, norm in norms.items():
        if isinstance(norm, TaperNorm):
            _require_linear(name, norm)
    return norms


def _require_linear(name: str, norm: TaperNorm) -> None:
    if bool(norm.c.isnan().any()):
        raise UserError(f"{name} is not calibrated: train at g = 1 inside Taper.observe(), then calibrate()")
    if norm.gate.form is not Form.LINEAR:
        raise UserError(
            f"the gate is {norm.gate.value.item():g} and folding needs 0: Taper.set_gate(0), or train to the end"
        )


def _refuse_hooks(name: str, norm: nn.Module) -> None:
    """A hook may change what the norm reads or returns, and would be lost with it."""
    if norm._forward_hooks or norm._forward_pre_hooks:
        raise UserError(f"cannot fold {name}: it carries a forward hook, which would go with it; remove the hook first")


def _form(norm: nn.Module, consumer: nn.Module) -> LinearForm:
    linear_form: Any = norm.linear_form
    return linear_form(consumer)


def _fold_into(layer: nn.Module, form: LinearForm) -> None:
    """Equations (6) and (7): layer(norm(h)) becomes layer(h). What shared the old weight keeps it."""
    weight = weight64(layer)  # (in, out)
    scaled = form.coefficient[:, None] * weight  # c diag(gamma_t) W
    if form.output_scale is not None:
        scaled = scaled * form.output_scale
    if form.centre:
        scaled = scaled - scaled.mean(dim=0, keepdim=True)  # (I - 11^T/d): every output's mean over the inputs
    replace(layer, scaled, None if form.bias is None else form.bias @ weight)


def _fixed_scale(name: str, norm: nn.Module, layers: list[nn.Module]) -> FixedScale:
    """The norm as one elementwise map."""
    form = _form(norm, layers[0])
    if form.output_scale is not None:
        raise UserError(
            f"cannot keep {name} as one explicit scale: the outputs of the map behind it have scales of their own "
            "(q,k and v a sigma_bar each); fold(model) takes them into its weights"
        )
    scale = FixedScale(len(form.coefficient), centre=form.centre, bias=form.bias is not None)
    scale = scale.to(norm.get_parameter("weight"))
    scale.weight.copy_(form.coefficient)
    if form.bias is not None and scale.bias is not None:
        scale.bias.copy_(form.bias)
    return scale.requires_grad_(any(parameter.requires_grad for parameter in norm.parameters()))


def _probe_tokens(model: nn.Module) -> Tensor:
    """A few random token ids (2, T) that any such model accepts."""
    device = next(model.parameters()).device
    length = min(context_of(model), 32)
    return torch.randint(vocabulary_of(model), (2, length), generator=generator(0, "fold/probe")).to(device)


def _probe(model: nn.Module, names: Iterable[str], tokens: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Logits of `tokens`, and the largest |mean| / sigma that each norm which centres reads on the way.

    Leaves hooks on these norms, which are about to go.
    """
    ratios: dict[str, float] = {}

    def watch(name: str, norm: nn.Module) -> None:
        def measure(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            h = args[0].double()
            ratios[name] = (h.mean(-1, keepdim=True).abs() / norm_scale(norm, h)).max().item()

        norm.register_forward_pre_hook(measure)

    for name in names:
        if kind_of(norm := model.get_submodule(name)).centres:
            watch(name, norm)
    return logits_of(model, tokens), ratios


def _size(model: nn.Module) -> tuple[int, int]:
    """Its parameters, in number and in bytes."""
    return sum(p.numel() for p in model.parameters()), sum(p.nbytes for p in model.parameters())


def _entry(name: str, norm: nn.Module, ratio: float | None, model: nn.Module, arch: Architecture) -> FoldedNorm:
    consumers = arch.consumers(name)
    form = _form(norm, model.get_submodule(consumers[0]))
    every = form.coefficient if form.output_scale is None else torch.outer(form.coefficient, form.output_scale)
    return FoldedNorm(
        name=name,
        consumers=tuple(consumers),
        c=norm.c.mean().item() if isinstance(norm, TaperNorm) else None,
        coefficient_min=every.min().item(),
        coefficient_max=every.max().item(),
        mean_to_sigma=ratio,
    )
