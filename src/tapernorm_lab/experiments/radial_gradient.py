"""The share of the pre-logit gradient along the residual stream: Prop. 4.1 on a trained model (method.md section 7)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.architectures import architecture_of, logits_of
from tapernorm.scale_loss import ScaleProbe
from tapernorm.util.module_modes import evaluating

from ..training.training_loss import cross_entropy


def radial_share(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Return the mean over tokens of |<grad_h CE, h>| / (||grad_h CE|| ||h||), in float64.

    h is the input of the final norm. Up to eps, the share is zero if a final norm divides by the scale of h. With a
    linear map in its place the share is not zero. A token without gradient, such as a saturated one after DyT, counts
    as zero.

    Args:
        inputs: ids (B, T), whose stream h the model computes in its own precision.
        targets: ids (B, T).
    """
    h = _pre_logit(model, inputs).double().requires_grad_()  # (B, T, D)
    arch = architecture_of(model)
    norm, head = (copy.deepcopy(model.get_submodule(name)).double() for name in (arch.final, arch.head))
    ScaleProbe.remove(norm)
    loss = cross_entropy(head(norm(h)), targets, reduction="sum")  # sum: each token's gradient is unscaled
    (gradient,) = torch.autograd.grad(loss, h)
    along = (gradient * h).sum(-1).abs()
    most = gradient.norm(dim=-1) * h.norm(dim=-1)
    return torch.where(most > 0, along / most, 0.0).mean().item()


@torch.no_grad()
def _pre_logit(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the input (B, T, D) of the final norm, in eval mode."""
    kept: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
        kept.append(args[0].detach())

    hook = model.get_submodule(architecture_of(model).final).register_forward_pre_hook(keep)
    try:
        with evaluating(model):
            logits_of(model, inputs)
    finally:
        hook.remove()
    return kept[0]
