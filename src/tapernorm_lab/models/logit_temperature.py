"""A control: a Baseline with all its norms and a learned scale of the logits per token.

Shapes: h (..., D), x = Norm(h) (..., D), w (D,).

    z = exp(<x, w>/D) x W_out

All-Taper's logits are c r(h) times those of the final norm: a scale per token, which a Baseline lacks. Two controls
separate the effect of that scale from that of removing norms. One tapers the final norm alone (`taper: final`). This
one scales by a function of the token's *normed* state: the final norm still hides r(h), and no norm is changed. w
starts at 0, where the model is bitwise the Baseline. The exponent is a mean over features, because Adam moves a sum by
up to D times the learning rate per step.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from tapernorm.norms import LayerNorm, RMSNorm
from tapernorm.util.errors import UserError


class Tempered(nn.Module):
    """A mixin that precedes a norm's class: exp(<x, w>/D) x with x = Norm(h)."""

    stored_as: ClassVar[str] = "tempered"
    temperature: nn.Parameter  # w

    def forward(self, h: Tensor) -> Tensor:
        x = super().forward(h)
        return x * torch.exp((x * self.temperature).mean(-1, keepdim=True))


class TemperedRMSNorm(Tempered, RMSNorm):
    """A final RMSNorm with a temperature per token."""


class TemperedLayerNorm(Tempered, LayerNorm):
    """A final LayerNorm with a temperature per token."""


_TEMPERED: dict[type[nn.Module], type[Tempered]] = {RMSNorm: TemperedRMSNorm, LayerNorm: TemperedLayerNorm}


def temper(norm: nn.Module) -> Tempered:
    """Turn a plain norm into its tempered form, in place. w starts at 0, where both compute the same bits.

    Raises:
        UserError: the norm is not a plain RMSNorm or LayerNorm.
    """
    if type(norm) not in _TEMPERED:
        raise UserError(f"a temperature needs a plain final norm, but this one is a {type(norm).__name__}")
    gamma = norm.get_parameter("weight")
    norm.__class__ = _TEMPERED[type(norm)]
    assert isinstance(norm, Tempered)
    norm.temperature = nn.Parameter(torch.zeros_like(gamma))
    return norm


def restore(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Give the named norms of a model a temperature, before its weights are loaded."""
    for name in names:
        temper(model.get_submodule(name))
