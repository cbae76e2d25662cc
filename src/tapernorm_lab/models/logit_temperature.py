"""A control: a Baseline whose logits have a learned scale per token, while all its norms stay.

Shapes: h (..., D), x = Norm(h) (..., D), w (D,).

    z = exp(<x, w>/D) x W_out

What All-Taper changes behind the trunk is a scale per token: its logits are c r(h) times those that the final norm
would give, r(h) being the trunk's to choose. A gain for all tokens alike the Baseline has already (the final gamma);
one per token it lacks. So an All-Taper that beats its Baseline may owe that to this temperature, and nothing to the
norms' being gone. Two controls take that apart:

- Only the final norm tapered (`sites: final`): the scale is c r(h), as in All-Taper, and every internal norm stays. But
  the radial direction opens with it (Prop. 4.2) and has to be anchored.
- This one. The scale is the exponential of a learned function of the token's *normed* state, so the final norm still
  hides r(h), the anchor of Prop. 4.1 holds, and no norm is touched: D parameters more, 0 at the start, where the model
  is bitwise the Baseline. A power r(h)^a would be the first control again, which is a = 1. No constant is added in
  the exponent: gamma is one already. The mean over features, not their sum, is its argument: an optimizer like Adam
  moves every entry of w by about the learning rate a step and a sum by up to D times that, half a unit of the exponent
  at D = 64 and a learning rate of 8e-3, and clipping would see a gradient D times as large.

A control that gains what All-Taper gains offers the temperature as its explanation. Where neither does, this form of a
temperature, trained at these settings, does not explain it; another form may.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from tapernorm.norms import LayerNorm, RMSNorm
from tapernorm.util.errors import UserError


class Tempered(nn.Module):
    """Mixed in before a norm's own class: exp(<x, w>/D) x of x = Norm(h)."""

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
    """Turn a plain norm into its tempered form, in place; w is 0, where the two are bitwise the same.

    Raises:
        UserError: it is no plain norm.
    """
    if type(norm) not in _TEMPERED:
        raise UserError(f"a temperature is read off a plain final norm, and this one is a {type(norm).__name__}")
    gamma = norm.get_parameter("weight")
    norm.__class__ = _TEMPERED[type(norm)]
    assert isinstance(norm, Tempered)
    norm.temperature = nn.Parameter(torch.zeros_like(gamma))
    return norm


def restore(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Give these norms of a model that is being loaded their temperature."""
    for name in names:
        temper(model.get_submodule(name))
