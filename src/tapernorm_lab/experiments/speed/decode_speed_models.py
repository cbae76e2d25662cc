"""The models that a decoding benchmark compares, all made from one tapered checkpoint.

One checkpoint serves every arm, because weights do not affect speed. The arms differ in what replaces the norms.
"""

import copy
from collections.abc import Callable

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
    """RMSNorm in the usual eager form, which takes several kernels."""

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
    """Return every arm of `ARMS`, packed for decoding, in `dtype`, on the device of `gated` (tapered, at g = 0).

    Args:
        replacements: those of `REPLACEMENTS` as well, under their names.

    Raises:
        UserError: the model is no tapered RMSNorm model.
    """
    names = [name for name, module in gated.named_modules() if isinstance(module, TaperNorm)]
    if gated.config.norm != "rmsnorm" or not names:
        found = f"{len(names)} tapered norms and norm {gated.config.norm!r}"
        raise UserError(f"the benchmark needs a tapered RMSNorm model and this one has {found}: give a tapered run")

    def plain(norm: nn.Module) -> nn.Module:
        made = make_norm(gated.config).to(norm.get_parameter("weight"))
        made.weight.copy_(norm.get_parameter("weight"))
        return made

    made = {
        "baseline_naive": _with_norms(gated, lambda n: NaiveRMSNorm(n.get_parameter("weight"), gated.config.norm_eps)),
        "baseline": _with_norms(gated, plain),
        "unfused": fold(gated, fused=False)[0],
        "fused": fold(gated, fused=True)[0],
        "identity": _with_norms(gated, lambda _: nn.Identity()),
    }
    for kind in REPLACEMENTS if replacements else ():
        made[kind] = _with_norms(gated, plain)
        replace_norms(made[kind], kind, alpha=0.5, attention_alpha=0.5)
        scale_embedding(made[kind])
    return {arm: PackedDecoder(model.to(dtype).requires_grad_(False)) for arm, model in made.items()}


def _with_norms(gated: Decoder, norm_for: Callable[[nn.Module], nn.Module]) -> Decoder:
    """Return a copy without its taper, in which another module replaces every norm."""
    model = copy.deepcopy(gated)
    forget_taper(model)
    arch = architecture_of(gated)
    for name in [*arch.internal_norms(gated), arch.final]:
        model.set_submodule(name, norm_for(gated.get_submodule(name)))
    return model
