"""Maps without statistics that others put in the place of every norm: DyT and Derf.

Shapes: x (..., D), gamma, beta (D,), alpha and s scalars, all of them learned.

    DyT(x)  = gamma tanh(alpha x) + beta       [Z] section 4
    Derf(x) = gamma erf(alpha x + s) + beta    [C] equation 10

[Z] Zhu, Chen, He, LeCun, Liu, Transformers without Normalization, arXiv 2503.10622. [C] Chen, Lu, Zhu, Sun, Liu,
Stronger Normalization-Free Transformers, arXiv 2512.10938. Both take each value by itself and bound it. Both are
nonlinear, so nothing of them folds into the next map: unlike a tapered norm they stay in the inference graph.

How their authors train language models, and so do we. The map stands where each norm was, the final one included;
gamma starts at 1, beta and s at 0 (a narrow model may be given another final gamma:
`config.study.NormReplacement`). alpha starts higher before attention than elsewhere, and lower the wider the model
([Z] section 7.2: 0.8 and 0.2 in LLaMA 7B). The code of [C] has a start of its own before attention, before the MLPs and
before the head of GPT-2, 1 where none is given. A learned scalar, sqrt(D) at the start, multiplies the embeddings.
Without it the first activations are too small for training to get under way ([Z] appendix A). The code of [C] has it
too, with a head that shares the unscaled embedding, as here.
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
    """What both have: alpha, which starts at `alpha`, and gamma and beta (D,), as a norm's `weight` and `bias`."""

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
    """Embeddings times a learned scalar; a head that shares their weight does not see it."""

    stored_as: ClassVar[str] = "scaled"

    scale: nn.Parameter  # ()

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


def replace_norms(model: Decoder, kind: str, *, alpha: float, attention_alpha: float, final_gain: float = 1.0) -> None:
    """Put a replacement in the place of every norm of `model`, the final one included.

    Args:
        kind: a name of `REPLACEMENTS`.
        alpha: where alpha starts before the MLPs and the head.
        attention_alpha: where it starts before attention.
        final_gain: where gamma of the final one starts; 1 as its authors have it, everywhere.

    Raises:
        UserError: a norm of `model` is no plain one; nothing has changed then.
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
    """Give the embeddings of `model` their learned scalar, in place.

    Args:
        start: where it starts; None: sqrt(D), as its authors have it. Embeddings drawn from normal(0, 0.02) then have a
            root mean square of 1.3 at their D of 4096, and of 0.16 at 64, where 64 gives 1.3.
    """
    embedding = model.model.embed_tokens
    weight = embedding.weight
    embedding.__class__ = ScaledEmbedding
    assert isinstance(embedding, ScaledEmbedding)
    embedding.scale = nn.Parameter(weight.new_tensor(start or math.sqrt(embedding.embedding_dim)))
    return embedding


def restore_dyt(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Put a DyT in the place of each of these norms of a model that is being loaded."""
    _restore(DynamicTanh, model, names)


def restore_derf(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Put a Derf in the place of each of these norms of a model that is being loaded."""
    _restore(DynamicErf, model, names)


def restore_embedding(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Give the embeddings of a decoder that is being loaded their learned scalar."""
    if not isinstance(model, Decoder):
        raise UserError(f"a {type(model).__name__} has no scaled embeddings: config.json is damaged")
    scale_embedding(model)


def _restore(kind: type[DynamicTanh | DynamicErf], model: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        model.set_submodule(name, kind(len(model.get_submodule(name).get_parameter("weight"))))
