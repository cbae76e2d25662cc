"""A control: a Baseline whose logits have a learned scale per token, while all its norms stay.

Shapes: h (..., D), x = Norm(h) (..., D), w (D,).

    z = exp(<x, w>/D) x W_out

All-Taper's logits are c r(h) times those that the final norm would give: a scale per token, which a Baseline lacks.
Two controls tell that scale from the norms' being gone. One tapers the final norm alone (`taper: final`). This one
scales by a function of the token's *normed* state, so that the final norm still hides r(h) and no norm is touched. w is
0 at the start, where the model is bitwise the Baseline. The exponent is a mean over features: Adam moves a sum by up to
D times the learning rate in a step.
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
