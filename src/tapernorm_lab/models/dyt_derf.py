"""DyT and Derf: published maps without statistics that replace every norm.

Shapes: x (..., D), gamma, beta (D,), alpha and s scalars, all of them learned.

    DyT(x)  = gamma tanh(alpha x) + beta       [Z] section 4
    Derf(x) = gamma erf(alpha x + s) + beta    [C] equation 10

[Z] Zhu, Chen, He, LeCun, Liu, Transformers without Normalization, arXiv 2503.10622. [C] Chen, Lu, Zhu, Sun, Liu,
Stronger Normalization-Free Transformers, arXiv 2512.10938. Both maps act on each value separately and bound it. Both
are nonlinear and do not fold into the next map. Unlike a tapered norm they stay in the inference graph.

Training follows the authors' language models. The map replaces every norm, including the final one. gamma starts at 1,
beta and s at 0; `config.study.NormReplacement` may set another final gamma for a narrow model. alpha starts higher
before attention than elsewhere, and lower in wider models ([Z] section 7.2: 0.8 and 0.2 in LLaMA 7B). The code of [C]
sets separate initial values before attention, the MLPs and the head of GPT-2, with 1 as the default. A learned scalar,
initially sqrt(D), multiplies the embeddings. Without it the first activations are too small for training to start ([Z]
appendix A). The code of [C] has it too, and its head shares the unscaled embedding, as here.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from tapernorm.architectures import architecture_of
from tapernorm.models.decoder import Decoder
from tapernorm.norms import LayerNorm, RMSNorm
from tapernorm.util.errors import UserError


class _Replacement(nn.Module):
    """The shared parameters: alpha, initially `alpha`, and gamma and beta (D,) as `weight` and `bias`."""

    def __init__(self, width: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))


class DynamicTanh(_Replacement):
    """gamma tanh(alpha x) + beta."""

    stored_as: ClassVar[str] = "dyt"

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, self.weight, torch.tanh(self.alpha * x))


class DynamicErf(_Replacement):
    """gamma erf(alpha x + s) + beta."""

    stored_as: ClassVar[str] = "derf"

    def __init__(self, width: int, alpha: float = 0.5) -> None:
        super().__init__(width, alpha)
        self.shift = nn.Parameter(torch.tensor(0.0))  # s

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, self.weight, torch.erf(self.alpha * x + self.shift))


REPLACEMENTS: dict[str, type[DynamicTanh | DynamicErf]] = {kind.stored_as: kind for kind in (DynamicTanh, DynamicErf)}


class ScaledEmbedding(nn.Embedding):
    """Embeddings times a learned scalar, which a head that shares their weight does not use."""

    stored_as: ClassVar[str] = "scaled"

    scale: nn.Parameter  # ()

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


def replace_norms(model: Decoder, kind: str, *, alpha: float, attention_alpha: float, final_gain: float = 1.0) -> None:
    """Replace every norm of `model`, including the final one, in place.

    Args:
        model: a fresh decoder.
        kind: a name of `REPLACEMENTS`.
        alpha: initial alpha before the MLPs and the head.
        attention_alpha: initial alpha before attention.
        final_gain: initial gamma of the final map; the authors use 1.

    Raises:
        UserError: a norm of `model` is not a plain norm; the model is then unchanged.
    """
    arch = architecture_of(model)
    norms = {name: model.get_submodule(name) for name in arch.norms(model)}
    for name, norm in norms.items():
        if type(norm) not in (RMSNorm, LayerNorm):
            found = type(norm).__name__
            raise UserError(f"{name} is a {found}, and {kind} takes the place of plain norms: give a fresh model")
    for name, norm in norms.items():
        gamma = norm.get_parameter("weight")
        before_attention = any(".self_attn." in consumer for consumer in arch.consumers(name))
        replacement = REPLACEMENTS[kind](len(gamma), attention_alpha if before_attention else alpha)
        model.set_submodule(name, replacement.to(gamma))
    nn.init.constant_(model.model.norm.weight, final_gain)


def scale_embedding(model: Decoder, start: float | None = None) -> ScaledEmbedding:
    """Give the embeddings of `model` a learned scalar, in place.

    Args:
        model: a fresh decoder.
        start: initial scalar; None: sqrt(D), as its authors use. Embeddings drawn from normal(0, 0.02) then have a root
            mean square of 1.3 at the authors' D = 4096, but of 0.16 at D = 64. There a scalar of 64 gives 1.3.
    """
    embedding = model.model.embed_tokens
    weight = embedding.weight
    embedding.__class__ = ScaledEmbedding
    assert isinstance(embedding, ScaledEmbedding)
    embedding.scale = nn.Parameter(weight.new_tensor(start or math.sqrt(embedding.embedding_dim)))
    return embedding


def restore_dyt(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Replace the named norms of a model by DyT, before its weights are loaded."""
    _restore(DynamicTanh, model, names)


def restore_derf(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Replace the named norms of a model by Derf, before its weights are loaded."""
    _restore(DynamicErf, model, names)


def restore_embedding(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Give the embeddings of a decoder a learned scalar, before its weights are loaded."""
    if not isinstance(model, Decoder):
        raise UserError(f"a {type(model).__name__} has no scaled embeddings: config.json is damaged")
    scale_embedding(model)


def _restore(kind: type[DynamicTanh | DynamicErf], model: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        model.set_submodule(name, kind(len(model.get_submodule(name).get_parameter("weight"))))
