"""Linear maps x -> x W + b with W (in, out), whichever way a layer stores W.

nn.Linear stores W transposed, (out, in). The Conv1D of transformers stores it as (in, out). A square matrix hides the
difference, so all access to such weights goes through this module.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn


def is_linear(layer: nn.Module) -> bool:
    """Return whether `layer` is a known linear map. Its class must be exact: a subclass may compute anything."""
    return type(layer) in (nn.Linear, _conv1d()) or is_split(layer)


def is_like_linear(layer: nn.Module) -> bool:
    """Return whether `layer` is an instance of a known linear map's class, or of a subclass."""
    conv1d = _conv1d()
    return isinstance(layer, nn.Linear) or (conv1d is not None and isinstance(layer, conv1d))


def is_split(layer: nn.Module) -> bool:
    """Return whether the parts of `layer` read inputs of their own. Its class names its ordinary class as `plain`."""
    return "plain" in vars(type(layer))


def sizes(layer: nn.Module) -> tuple[int, int]:
    """(in, out)."""
    first, second = layer.get_parameter("weight").shape
    return (second, first) if isinstance(layer, nn.Linear) else (first, second)


def weight64(layer: nn.Module) -> Tensor:
    """Return W (in, out) in float64."""
    weight = layer.get_parameter("weight").detach().double()
    return weight.T if isinstance(layer, nn.Linear) else weight


def replace(layer: nn.Module, weight: Tensor, shift: Tensor | None) -> None:
    """Replace the layer's weight by `weight` (in, out), and add `shift` (out,) to its bias.

    Both are float64 and are cast once. Modules that share the old parameters keep them.
    """
    stored = (weight.T if isinstance(layer, nn.Linear) else weight).contiguous()
    owner: Any = layer
    if shift is not None:
        owner.bias = _like(layer, shift if layer.bias is None else owner.bias.detach().double() + shift)
    owner.weight = _like(layer, stored)


def give_bias(layer: nn.Module) -> None:
    """Add a bias of zeros to a layer without a bias."""
    owner: Any = layer
    if layer.bias is None:
        owner.bias = _like(layer, torch.zeros(weight64(layer).shape[1], device=owner.weight.device))


def make_plain(layer: nn.Module) -> None:
    """Change a split layer back to its ordinary class, in place. Hooks and parameters stay."""
    if is_split(layer):
        layer.__class__ = vars(type(layer))["plain"]


def _conv1d() -> Any:
    """Return transformers' Conv1D, or None if its module is not imported, so that no such object exists."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def _like(layer: nn.Module, value: Tensor) -> nn.Parameter:
    old = layer.get_parameter("weight")
    return nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
