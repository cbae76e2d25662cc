"""Which linear maps a norm really feeds, seen in one forward pass rather than believed."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .errors import UserError


class _Uses(TorchFunctionMode):
    """Records what consumes the outputs of some norms, and which inputs each linear map gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, str] = {}  # id of an output -> the norm that made it
        self.outputs: list[Tensor] = []  # keeps those ids from being used again
        self.linear: list[tuple[int, str | None]] = []  # (id of a weight, norm behind its input)
        self.other: list[tuple[str, str]] = []  # (norm, function that is no linear map)

    def made_by(self, norm: str, output: Tensor) -> None:
        self.sources[id(output)] = norm
        self.outputs.append(output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.linear.append((id(args[1]), self.sources.get(id(args[0]))))
        elif any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # a shape or dtype is no use of the values
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self.sources:
                    self.other.append((self.sources[id(leaf)], getattr(func, "__name__", str(func))))
        return result


def require_foldable(model: nn.Module, consumers: Mapping[str, list[str]], tokens: Tensor) -> None:
    """Run `model` on `tokens` and refuse unless each norm feeds exactly its consumers, and they nothing else.

    Args:
        consumers: norm -> the `nn.Linear`s it is said to feed, by module name.

    Raises:
        UserError: a consumer is no nn.Linear or gets other inputs too, or a norm feeds anything else.
    """
    for norm, names in consumers.items():
        for name in names:
            if type(layer := model.get_submodule(name)) is not nn.Linear:
                raise UserError(f"cannot fold {norm} into {name}: it is a {type(layer).__name__}, not an nn.Linear")
    uses = _observe(model, list(consumers), tokens)
    for norm, function in uses.other:
        raise UserError(
            f"cannot fold {norm}: its output also goes into {function}, which is no linear map; "
            "fold(model, fused=False) keeps an explicit scale there"
        )
    names_of = {id(m.weight): n for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    seen: dict[str, set[str | None]] = {}
    for weight, source in uses.linear:
        seen.setdefault(names_of.get(weight, "a weight outside any module"), set()).add(source)
    for norm, names in consumers.items():
        fed = {layer for layer, sources in seen.items() if norm in sources}
        if fed != set(names):
            raise UserError(f"cannot fold {norm}: it feeds {sorted(fed)}, and {sorted(names)} were expected")
        for layer in names:
            if others := seen[layer] - {norm}:
                also = ", ".join(sorted(str(o or "something that is not a tapered norm") for o in others))
                raise UserError(f"cannot fold {norm} into {layer}: that layer is shared, it is also fed by {also}")


@torch.no_grad()
def _observe(model: nn.Module, norms: list[str], tokens: Tensor) -> _Uses:
    uses = _Uses()

    def watch(name: str) -> Any:
        return model.get_submodule(name).register_forward_hook(lambda _, __, output: uses.made_by(name, output))

    handles = [watch(name) for name in norms]
    try:
        with uses:
            model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return uses
