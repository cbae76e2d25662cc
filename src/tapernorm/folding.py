"""Folding: at g = 0 a tapered norm is a linear map, which equations (6), (7) of `taper` merge into the next one.

Vectors are rows: x -> x W + b, with W (in, out) however a layer stores it.
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
MEAN_TO_SIGMA = 100.0  # costs a hundred float32 roundings, about 1e-5: the accuracy of a fold in float32


@dataclass(frozen=True)
class FoldedNorm:
    """One norm that `fold` removed.

    Attributes:
        name: full name of the norm.
        consumers: the linear maps that it was folded into. An unfused norm is a `FixedScale` before them.
        c: the constant c, or the mean of one c per feature. None for a FakeLN, which has a sigma_bar instead.
        coefficient_min: smallest entry of c * gamma_t, or of gamma / sigma_bar.
        coefficient_max: largest entry of the same.
        mean_to_sigma: largest |mean| / sigma of the norm's input in the probe pass. None for a norm that does not
            centre.
    """

    name: str
    consumers: tuple[str, ...]
    c: float | None
    coefficient_min: float
    coefficient_max: float
    mean_to_sigma: float | None


@dataclass(frozen=True)
class FoldReport:
    """What `fold` changed, and by how much the logits differ.

    Attributes:
        fused: whether the norms were folded into the linear maps.
        norms: the removed norms, in the order in which they ran.
        head_untied: whether a tied output head got a weight of its own.
        parameters_before: number of parameters of the tapered model.
        parameters_after: number of parameters of the folded model.
        bytes_before: size of the tapered model's parameters.
        bytes_after: size of the folded model's parameters.
        largest_logit_difference: largest |difference| between the logits of the folded and of the tapered model at
            g = 0. Both are computed on random tokens, in the model's dtype.
        largest_logit: largest |logit| of the tapered model on these tokens, the scale of the difference.
    """

    fused: bool
    norms: tuple[FoldedNorm, ...]
    head_untied: bool
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    largest_logit_difference: float
    largest_logit: float

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each norm whose fold loses digits in float32.

        A folded norm does not subtract the mean of h. The mean cancels in the sum h W', up to a rounding error of
        |mean| / sigma units.
        """
        if not self.fused:
            return ()
        return tuple(
            f"{norm.name} reads tokens whose mean is up to {norm.mean_to_sigma:.2g} times their standard deviation. "
            "Centring loses digits by that factor, and a few times more when folded: in float32, about "
            f"{norm.mean_to_sigma * torch.finfo(torch.float32).eps:.0e} of the output. Compare losses, or fold with "
            "fused=False"
            for norm in self.norms
            if norm.mean_to_sigma is not None and norm.mean_to_sigma > MEAN_TO_SIGMA
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the report and its warnings as JSON values."""
        return {**asdict(self), "warnings": self.warnings}


@torch.no_grad()
def fold(model: M, *, fused: bool = True) -> tuple[M, FoldReport]:
    """Fold the tapered norms of `model` into its linear maps, and return the folded copy and a report.

        W' = c diag(gamma_t) W                              (6), RMSNorm
        W' = c (I - 11^T/d) diag(gamma_t) W                 (6), LayerNorm
        b' = b + beta W                                     (7), LayerNorm

    The copy computes the same function, and `model` is unchanged. The products are computed in float64 and cast once.
    A tied head is untied before the final norm is folded into it, so that the embedding does not change. Norms of
    FakeLN fold in the same way, with 1 / sigma_bar for c and gamma for gamma_t.

    Args:
        model: a calibrated model at g = 0.
        fused: whether to fold into the linear maps, so that no module of the norm remains. False replaces each norm by
            an explicit `FixedScale`.

    Raises:
        UserError: no norm is tapered, the model is folded already, the gate is not 0, or a norm is not calibrated. A
            norm feeds something else than linear maps of its own. A wrapper, such as a PeftModel, hides the model.
    """
    arch = architecture_of(model)
    norms = _foldable_norms(model, arch)
    require_apart(model, norms)
    require_own_weights(model, [consumer for name in norms for consumer in arch.consumers(name)] if fused else [])
    folded = copy.deepcopy(model).eval()  # runs every pass below: a pass of `model` would change its taper's probe
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
    """Return whether `model` is the result of `fold`, fused or not."""
    sites = (model.get_submodule(name) for name in architecture_of(model).norms(model))
    return any(isinstance(norm, nn.Identity | FixedScale) for norm in sites)


def _foldable_norms(model: nn.Module, arch: Architecture) -> dict[str, nn.Module]:
    sites = {name: model.get_submodule(name) for name in arch.norms(model)}
    norms = {name: norm for name, norm in sites.items() if hasattr(norm, "linear_form")}
    if not norms:
        if is_folded(model):
            raise UserError("this model is folded already: fold the tapered model that it came from")
        raise UserError("no norm of this model is tapered: call attach(model), train through the taper, then fold")
    for name, norm in norms.items():
        if isinstance(norm, TaperNorm):
            _require_linear(name, norm)
    return norms


def _require_linear(name: str, norm: TaperNorm) -> None:
    if bool(norm.c.isnan().any()):
        raise UserError(f"{name} is not calibrated: train at g = 1 inside Taper.observe(), then calibrate()")
    if norm.gate.form is not Form.LINEAR:
        raise UserError(
            f"the gate is {norm.gate.value.item():g} and folding needs 0: call Taper.set_gate(0), or train to the end "
            "of the schedule"
        )


def _refuse_hooks(name: str, norm: nn.Module) -> None:
    """Raise UserError if `norm` carries a forward hook, which may change what the norm computes."""
    if norm._forward_hooks or norm._forward_pre_hooks:
        raise UserError(f"cannot fold {name}: folding would drop its forward hook; remove the hook first")


def _form(norm: nn.Module, consumer: nn.Module) -> LinearForm:
    linear_form: Any = norm.linear_form
    return linear_form(consumer)


def _fold_into(layer: nn.Module, form: LinearForm) -> None:
    """Change `layer` so that layer(h) is the former layer(norm(h)): equations (6) and (7).

    Modules that share the old weight keep it.
    """
    weight = weight64(layer)  # (in, out)
    scaled = form.coefficient[:, None] * weight  # c diag(gamma_t) W
    if form.output_scale is not None:
        scaled = scaled * form.output_scale
    if form.centre:
        scaled = scaled - scaled.mean(dim=0, keepdim=True)  # (I - 11^T/d): subtracts each column's mean over the inputs
    replace(layer, scaled, None if form.bias is None else form.bias @ weight)


def _fixed_scale(name: str, norm: nn.Module, layers: list[nn.Module]) -> FixedScale:
    """Return the norm's g = 0 map as one elementwise module."""
    form = _form(norm, layers[0])
    if form.output_scale is not None:
        raise UserError(
            f"cannot fold {name} with fused=False: the outputs of the linear map that it feeds have different scales "
            "(one sigma_bar for q and k, one for v); call fold(model), which folds them into its weight"
        )
    scale = FixedScale(len(form.coefficient), centre=form.centre, bias=form.bias is not None)
    scale = scale.to(norm.get_parameter("weight"))
    scale.weight.copy_(form.coefficient)
    if form.bias is not None and scale.bias is not None:
        scale.bias.copy_(form.bias)
    return scale.requires_grad_(any(parameter.requires_grad for parameter in norm.parameters()))


def _probe_tokens(model: nn.Module) -> Tensor:
    """Return random token ids (2, T) within the model's vocabulary and context."""
    device = next(model.parameters()).device
    length = min(context_of(model), 32)
    return torch.randint(vocabulary_of(model), (2, length), generator=generator(0, "fold/probe")).to(device)


def _probe(model: nn.Module, names: Iterable[str], tokens: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Return the logits of `tokens`, and the largest |mean| / sigma in the input of each norm that centres.

    The hooks stay on these norms, which folding removes.
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
    """Return the number and the bytes of the model's parameters."""
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
