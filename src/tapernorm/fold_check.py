"""The check that precedes folding: one forward pass shows which linear maps each norm feeds."""

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

_QUESTIONS = {  # reads of a tensor's metadata, which do not use its values
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")),
    Tensor.__len__,
}
_VIEWS = {Tensor.view, Tensor.reshape, Tensor.__getitem__}  # a view of whole rows is still the norm's output
_PRODUCTS = {  # a function that computes x W + b -> the names of its operands, and the name of x
    F.linear: (("input", "weight", "bias"), "input"),
    torch.addmm: (("input", "mat1", "mat2"), "mat1"),
}
_REMEDY = "call fold(model, fused=False), which keeps the norm as an explicit scale"


class _Uses(TorchFunctionMode):
    """A recorder of what consumes the outputs of some norms, and of which inputs each linear map reads."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, str] = {}  # id of a norm's output, or of a view of its rows -> the norm
        self.kept: list[Any] = []  # the outputs, kept alive so that no other tensor gets the same id
        self.inputs: dict[str, tuple[Tensor, int]] = {}  # norm -> its input, and the version of that tensor
        self.running: tuple[str, nn.Module] | None = None  # the linear map whose forward runs
        self.fed: dict[str, set[str | None]] = {}  # linear map -> the norms that feed it; None: any other source
        self.faults: list[tuple[str, str]] = []  # (norm, why it cannot be folded)

    def made_by(self, norm: str, h: Tensor, output: Any) -> None:
        """Record that `norm` read `h` and returned `output`."""
        self._name(output, norm)
        self.inputs[norm] = h, h._version

    def enter(self, linear: str, layer: nn.Module, inputs: list[Any]) -> None:
        """Record that the forward of `layer`, named `linear`, starts."""
        self.running = linear, layer
        if is_split(layer):  # its forward splits the input, and still computes x W + b
            self._feed(linear, self.sources.get(id(inputs[0])))

    def leave(self) -> None:
        """Record that the forward of the running layer has ended."""
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
            if h._version != version:  # after folding, the linear map reads h itself
                self.faults.append((norm, f"its input is changed in place before {linear} reads its output"))

    def _note(self, func: Any, operands: Any) -> None:
        for leaf in tree_leaves(operands):
            if id(leaf) in self.sources:
                name = getattr(func, "__name__", str(func))
                self.faults.append((self.sources[id(leaf)], f"its output also goes into {name}, outside any nn.Linear"))


def _input_of(layer: nn.Module, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return x if this call computes x W + b with all of the layer's own parameters, else None."""
    names, x = _PRODUCTS[func]
    operands = dict(zip(names, args, strict=False)) | kwargs
    found = operands.pop(x)
    own = {id(parameter) for parameter in (layer.weight, layer.bias) if parameter is not None}
    return found if {id(operand) for operand in operands.values() if operand is not None} == own else None


def _is_of_whole_rows(view: Tensor, x: Tensor) -> bool:
    """Return whether `view` consists of whole rows of x, in x's own memory."""
    return (
        view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        and (view.ndim, x.ndim) > (0, 0)
        and (view.shape[-1], view.stride(-1)) == (x.shape[-1], x.stride(-1))
    )


def require_foldable(model: nn.Module, consumers: Mapping[str, list[str]], tokens: Tensor) -> None:
    """Run `model` on `tokens` and require that each norm feeds exactly its consumers, and each consumer reads one norm.

    Args:
        model: the model, with its norms in place.
        consumers: norm -> the linear maps that its architecture lists for it, by full module names.
        tokens: ids (B, T) of the forward pass.

    Raises:
        UserError: a consumer is not a known linear map, or it has other inputs. A norm feeds anything else.
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
                "correct the row of this class in tapernorm.architectures"
            )
        for layer in names:
            if others := uses.fed[layer] - {norm}:
                also = ", ".join(sorted(str(o or "something that is not a tapered norm") for o in others))
                raise UserError(
                    f"cannot fold {norm} into {layer}: that layer is shared, because {also} feeds it too; {_REMEDY}"
                )


@torch.no_grad()
def _observe(model: nn.Module, norms: list[str], tokens: Tensor) -> _Uses:
    uses = _Uses()

    def watch_norm(name: str) -> Any:
        norm = model.get_submodule(name)
        return norm.register_forward_hook(lambda _, inputs, output: uses.made_by(name, inputs[0], output))

    def watch_linear(name: str, layer: nn.Module) -> Iterator[Any]:
        """Yield hooks that enclose the layer's own forward and run inside all other hooks."""
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
