"""Find the first value of a forward pass that is not finite, and the tapered norm that let a token grow before it.

A tapered norm with gate g and constant c scales a token of scale s by g + (1 - g) * c * s, relative to the plain norm.
The maps after a norm are at least quadratic in it. A token that one norm makes ten times too large is therefore
thousands of times too large a few blocks later, and overflows.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tapernorm.architectures import logits_of
from tapernorm.norms import TaperNorm, norm_scale
from tapernorm.util.errors import UserError

GROWN = 10.0  # factor above what the norm would give, from which a token counts as grown


class Diverged(UserError):
    """A loss or gradient is not finite. It is raised before the optimizer step that would use the value."""


@dataclass(frozen=True)
class Growth:
    """The token that a tapered norm enlarges the most."""

    norm: str
    factor: float  # g + (1 - g) * c * s
    position: int  # position of the token in its row


@dataclass(frozen=True)
class Overflow:
    """The first value of a forward pass that is not finite."""

    module: str  # the module that returns it, from finite inputs
    growth: Growth | None  # at the first tapered norm, in running order, that makes a token `GROWN` times too large

    def __str__(self) -> str:
        told = f"the first value that is not finite came out of {self.module}"
        if self.growth is None:
            return told
        position = f"the token at position {self.growth.position}"
        return f"{told}, after {self.growth.norm} let out {position} {self.growth.factor:.3g} times too large"


@torch.no_grad()
def find_overflow(model: nn.Module, tokens: Tensor) -> Overflow | None:
    """Run `model` in its present mode on tokens (B, T); return None if the output of every module is finite."""
    found: list[str] = []
    length = tokens.shape[1]
    grown: list[Growth] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
            if not found and not _finite(output) and _finite((args, kwargs)):
                found.append(name)

        return hook

    def follow(name: str, norm: TaperNorm) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            if not grown and not found and (growth := _growth(name, norm, args[0], length)).factor >= GROWN:
                grown.append(growth)

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(watch(name or "the model"), with_kwargs=True).remove)
            if isinstance(module, TaperNorm):
                hooks.callback(module.register_forward_pre_hook(follow(name, module)).remove)
        logits_of(model, tokens)
    return Overflow(found[0], grown[0] if grown else None) if found else None


def _growth(name: str, norm: TaperNorm, h: Tensor, length: int) -> Growth:
    g = norm.gate.value
    scales = norm_scale(norm, h.to(torch.promote_types(h.dtype, torch.float32)))
    factors = g + (1 - g) * norm.c.mean() * scales  # one per token
    place = int(factors.nan_to_num().argmax())
    return Growth(name, factors.flatten()[place].item(), place % length)


def _finite(tree: object) -> bool:
    """Whether every floating-point tensor in `tree` is finite."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
