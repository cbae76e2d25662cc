"""Which linear maps a norm really feeds, seen in one forward pass rather than believed."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .errors import UserError

_QUESTIONS = {  # about a tensor, which its values do not answer: no use of a norm's output
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")),
    Tensor.__len__,
}
_REMEDY = "fold(model, fused=False) keeps an explicit scale instead"


class _Uses(TorchFunctionMode):
    """Records what consumes the outputs of some norms, and which inputs each linear map gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, str] = {}  # id of an output -> the norm that made it
        self.kept: list[Any] = []  # keeps those ids from being used again
        self.inputs: dict[str, tuple[Tensor, int]] = {}  # norm -> what it read, and how often that had been changed
        self.running: str | None = None  # the nn.Linear whose forward runs
        self.fed: dict[str, set[str | None]] = {}  # nn.Linear -> the norms behind its inputs; None: anything else
        self.faults: list[tuple[str, str]] = []  # (norm, why it cannot be folded)

    def made_by(self, norm: str, h: Tensor, output: Any) -> None:
        self.sources[id(output)] = norm
        self.kept.append(output)
        self.inputs[norm] = h, h._version

    def run(self, linear: str | None) -> None:
        self.running = linear

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and self.running:
            operands = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            self._feed(self.running, self.sources.get(id(operands.pop("input"))))
            self._note(func, operands)
        elif func not in _QUESTIONS:
            self._note(func, (args, kwargs))
        return func(*args, **kwargs)

    def _feed(self, linear: str, norm: str | None) -> None:
        self.fed.setdefault(linear, set()).add(norm)
        if norm is not None:
            h, version = self.inputs[norm]
            if h._version != version:  # folded, the linear map reads h itself
                self.faults.append((norm, f"its input is changed in place before {linear} reads its output"))

    def _note(self, func: Any, operands: Any) -> None:
        for leaf in tree_leaves(operands):
            if id(leaf) in self.sources:
                name = getattr(func, "__name__", str(func))
                self.faults.append((self.sources[id(leaf)], f"its output also goes into {name}, outside any nn.Linear"))


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
                raise UserError(
                    f"cannot fold {norm} into {name}: it is a {type(layer).__name__}, not an nn.Linear; {_REMEDY}"
                )
    uses = _observe(model, list(consumers), tokens)
    for norm, fault in uses.faults:
        raise UserError(f"cannot fold {norm}: {fault}; {_REMEDY}")
    for norm, names in consumers.items():
        fed = {layer for layer, sources in uses.fed.items() if norm in sources}
        if fed != set(names):
            raise UserError(
                f"cannot fold {norm}: it feeds {sorted(fed)}, and {sorted(names)} were expected; "
                "mend the architecture's row in tapernorm.arch"
            )
        for layer in names:
            if others := uses.fed[layer] - {norm}:
                also = ", ".join(sorted(str(o or "something that is not a tapered norm") for o in others))
                raise UserError(
                    f"cannot fold {norm} into {layer}: that layer is shared, it is also fed by {also}; {_REMEDY}"
                )


@torch.no_grad()
def _observe(model: nn.Module, norms: list[str], tokens: Tensor) -> _Uses:
    uses = _Uses()

    def watch_norm(name: str) -> Any:
        norm = model.get_submodule(name)
        return norm.register_forward_hook(lambda _, inputs, output: uses.made_by(name, inputs[0], output))

    def watch_linear(name: str, layer: nn.Linear) -> Iterator[Any]:
        yield layer.register_forward_pre_hook(lambda _, __: uses.run(name))
        yield layer.register_forward_hook(lambda _, __, ___: uses.run(None))

    linears = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    handles = [watch_norm(name) for name in norms]
    handles += [handle for name, layer in linears for handle in watch_linear(name, layer)]
    try:
        with uses:
            model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return uses
