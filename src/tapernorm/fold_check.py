"""Which linear maps a norm really feeds, seen in one forward pass rather than believed."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .architectures import logits_of
from .linear_maps import is_like_linear, is_linear, is_split
from .util.errors import UserError

_QUESTIONS = {  # about a tensor, which its values do not answer: no use of a norm's output
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")),
    Tensor.__len__,
}
_VIEWS = {Tensor.view, Tensor.reshape, Tensor.__getitem__}  # of whole rows: the norm's output still
_PRODUCTS = {  # what computes x W + b -> its operands, and which of them is x
    F.linear: (("input", "weight", "bias"), "input"),
    torch.addmm: (("input", "mat1", "mat2"), "mat1"),
}
_REMEDY = "fold(model, fused=False) keeps an explicit scale instead"


class _Uses(TorchFunctionMode):
    """Records what consumes the outputs of some norms, and which inputs each linear map gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, str] = {}  # id of an output, or of a view of its rows -> the norm that made it
        self.kept: list[Any] = []  # keeps those ids from being used again
        self.inputs: dict[str, tuple[Tensor, int]] = {}  # norm -> what it read, and how often that had been changed
        self.running: tuple[str, nn.Module] | None = None  # the linear map whose forward runs
        self.fed: dict[str, set[str | None]] = {}  # linear map -> the norms behind its inputs; None: anything else
        self.faults: list[tuple[str, str]] = []  # (norm, why it cannot be folded)

    def made_by(self, norm: str, h: Tensor, output: Any) -> None:
        self._name(output, norm)
        self.inputs[norm] = h, h._version

    def enter(self, linear: str, layer: nn.Module, inputs: list[Any]) -> None:
        self.running = linear, layer
        if is_split(layer):  # its forward takes the input apart, and is known to be x W + b all the same
            self._feed(linear, self.sources.get(id(inputs[0])))

    def leave(self) -> None:
        self.running = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS or (self.running and is_split(self.running[1])):
            return func(*args, **kwargs)
        if self.running and func in _PRODUCTS:
            x = _input_of(self.running[1], func, args, kwargs)
            if x is not None:
                self._feed(self.running[0], self.sources.get(id(x)))
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _VIEWS and _is_of_whole_rows(result, args[0]) and id(args[0]) in self.sources:
            self._name(result, self.sources[id(args[0])])
            args = args[1:]
        self._note(func, (args, kwargs))
        return result

    def _name(self, output: Any, norm: str) -> None:
        self.sources[id(output)] = norm
        self.kept.append(output)

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


def _input_of(layer: nn.Module, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """x where this call is x W + b with the layer's own parameters, all of them; else None."""
    names, x = _PRODUCTS[func]
    operands = dict(zip(names, args, strict=False)) | kwargs
    found = operands.pop(x)
    own = {id(parameter) for parameter in (layer.weight, layer.bias) if parameter is not None}
    return found if {id(operand) for operand in operands.values() if operand is not None} == own else None


def _is_of_whole_rows(view: Tensor, x: Tensor) -> bool:
    """Whether `view` shows rows of x as they lie in memory, none of them cut."""
    return (
        view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        and (view.ndim, x.ndim) > (0, 0)
        and (view.shape[-1], view.stride(-1)) == (x.shape[-1], x.stride(-1))
    )


def require_foldable(model: nn.Module, consumers: Mapping[str, list[str]], tokens: Tensor) -> None:
    """Run `model` on `tokens` and refuse unless each norm feeds exactly its consumers, and they nothing else.

    Args:
        consumers: norm -> the linear maps it is said to feed, by module name.

    Raises:
        UserError: a consumer is no known linear map or gets other inputs too, or a norm feeds anything else.
    """
    for norm, names in consumers.items():
        for name in names:
            if not is_linear(layer := model.get_submodule(name)):
                raise UserError(
                    f"cannot fold {norm} into {name}: it is a {type(layer).__name__}, not an nn.Linear or Conv1D; "
                    f"{_REMEDY}"
                )
    uses = _observe(model, list(consumers), tokens)
    for norm, fault in uses.faults:
        raise UserError(f"cannot fold {norm}: {fault}; {_REMEDY}")
    for norm, names in consumers.items():
        fed = {layer for layer, sources in uses.fed.items() if norm in sources}
        if fed != set(names):
            raise UserError(
                f"cannot fold {norm}: it feeds {sorted(fed)}, and {sorted(names)} were expected; "
                "mend the architecture's row in tapernorm.architectures"
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

    def watch_linear(name: str, layer: nn.Module) -> Iterator[Any]:
        """Around the layer's own forward, within any other hook: what that does with an input is no part of x W + b."""
        yield layer.register_forward_pre_hook(
            lambda _, args, kwargs: uses.enter(name, layer, [*args, *kwargs.values()]), with_kwargs=True
        )
        yield layer.register_forward_hook(lambda _, __, ___: uses.leave(), prepend=True)

    linears = [(name, layer) for name, layer in model.named_modules() if is_like_linear(layer)]
    handles = [watch_norm(name) for name in norms]
    handles += [handle for name, layer in linears for handle in watch_linear(name, layer)]
    try:
        with uses:
            logits_of(model, tokens)
    finally:
        for handle in handles:
            handle.remove()
    return uses
