"""The models that a decoding benchmark compares, all made from one tapered checkpoint.

Weights do not change speed, so one checkpoint serves every arm; what differs is what stands in the norms' places.
"""

import copy

import torch
from torch import Tensor, nn

from tapernorm.architectures import architecture_of
from tapernorm.folding import fold
from tapernorm.models.decoder import Decoder, make_norm
from tapernorm.models.packed_decoder import PackedDecoder
from tapernorm.norms import TaperNorm
from tapernorm.taper import forget_taper
from tapernorm.util.errors import UserError

from ...models.dyt_derf import REPLACEMENTS, replace_norms, scale_embedding

ARMS = ("baseline_naive", "baseline", "unfused", "fused", "identity")  # and, beside them, those of `REPLACEMENTS`


class NaiveRMSNorm(nn.Module):
    """RMSNorm as eager model code spells it out, several kernels long."""

    def __init__(self, gamma: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(gamma.detach().clone())
        self.eps = eps

    def forward(self, h: Tensor) -> Tensor:
        wide = h.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(h.dtype)


@torch.no_grad()
def make_arms(gated: Decoder, dtype: torch.dtype, *, replacements: bool = False) -> dict[str, PackedDecoder]:
    """Every arm of `ARMS`, packed for decoding, in `dtype`, on the device of `gated` (tapered, at g = 0).

    Args:
        replacements: those of `REPLACEMENTS` as well, under their names.

    Raises:
        UserError: the model is no tapered RMSNorm model.
    """
    names = [name for name, module in gated.named_modules() if isinstance(module, TaperNorm)]
    if gated.config.norm != "rmsnorm" or not names:
        found = f"{len(names)} tapered norms and norm {gated.config.norm!r}"
        raise UserError(f"the benchmark needs a tapered RMSNorm model and this one has {found}: give a tapered run")
    made = {
        "baseline_naive": _with_norms(gated, naive=True),
        "baseline": _with_norms(gated, naive=False),
        "unfused": fold(gated, fused=False)[0],
        "fused": fold(gated, fused=True)[0],
        "identity": _with_norms(gated, naive=None),
        **({kind: _with_replacement(gated, kind) for kind in REPLACEMENTS} if replacements else {}),
    }
    return {arm: PackedDecoder(model.to(dtype).requires_grad_(False)) for arm, model in made.items()}


def _with_norms(gated: Decoder, *, naive: bool | None) -> Decoder:
    """A copy with every norm plain, spelt out (naive), or gone (None)."""
    model = copy.deepcopy(gated)
    forget_taper(model)
    arch = architecture_of(gated)
    for name in [*arch.internal_norms(gated), arch.final]:
        model.set_submodule(name, _norm_like(gated, gated.get_submodule(name), naive=naive))
    return model


def _with_replacement(gated: Decoder, kind: str) -> Decoder:
    """A copy with a replacement in the place of every norm, and its scaled embedding."""
    model = _with_norms(gated, naive=False)
    replace_norms(model, kind, alpha=0.5, attention_alpha=0.5)
    scale_embedding(model)
    return model


def _norm_like(gated: Decoder, norm: nn.Module, *, naive: bool | None) -> nn.Module:
    gamma = norm.get_parameter("weight")
    if naive is None:
        return nn.Identity()
    if naive:
        return NaiveRMSNorm(gamma, gated.config.norm_eps)
    plain = make_norm(gated.config).to(gamma)
    plain.weight.copy_(gamma)
    return plain
