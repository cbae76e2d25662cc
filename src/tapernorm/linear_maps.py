"""One view of the linear maps x -> x W + b, whichever way round a layer stores W.

nn.Linear holds W transposed, (out, in); the Conv1D of transformers holds it as it is, (in, out). Square matrices hide
the difference, so nothing else in the house touches such a weight: here W is always (in, out).
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn


def is_linear(layer: nn.Module) -> bool:
    """Whether this is one of the known maps; a subclass may compute anything, so the class must be exact."""
    return type(layer) in (nn.Linear, _conv1d()) or is_split(layer)


def is_like_linear(layer: nn.Module) -> bool:
    """Whether this is a known map or an object of a class derived from one."""
    conv1d = _conv1d()
    return isinstance(layer, nn.Linear) or (conv1d is not None and isinstance(layer, conv1d))


def is_split(layer: nn.Module) -> bool:
    """Whether this is a map whose parts read inputs of their own; its class says in `plain` what it is without."""
    return "plain" in vars(type(layer))


def sizes(layer: nn.Module) -> tuple[int, int]:
    """(in, out)."""
    first, second = layer.get_parameter("weight").shape
    return (second, first) if isinstance(layer, nn.Linear) else (first, second)


def weight64(layer: nn.Module) -> Tensor:
    """W (in, out) in float64."""
    weight = layer.get_parameter("weight").detach().double()
    return weight.T if isinstance(layer, nn.Linear) else weight


def replace(layer: nn.Module, weight: Tensor, shift: Tensor | None) -> None:
    """Give the layer new parameters: `weight` (in, out), and its bias plus `shift` (out,); both float64, cast once.

    Whatever else shares the old parameters keeps them.
    """
    stored = (weight.T if isinstance(layer, nn.Linear) else weight).contiguous()
    owner: Any = layer
    if shift is not None:
        owner.bias = _like(layer, shift if layer.bias is None else owner.bias.detach().double() + shift)
    owner.weight = _like(layer, stored)


def give_bias(layer: nn.Module) -> None:
    """A bias of zeros, where the layer has none."""
    owner: Any = layer
    if layer.bias is None:
        owner.bias = _like(layer, torch.zeros(weight64(layer).shape[1], device=owner.weight.device))


def make_plain(layer: nn.Module) -> None:
    """Undo such a split, in place: hooks and parameters stay."""
    if is_split(layer):
        layer.__class__ = vars(type(layer))["plain"]


def _conv1d() -> Any:
    """The class of transformers, or None: before its module is imported, no object of the class exists."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def _like(layer: nn.Module, value: Tensor) -> nn.Parameter:
    old = layer.get_parameter("weight")
    return nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
