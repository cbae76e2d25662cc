"""Which kernel computes the float32 linear maps y = x W^T + b of a CPU: PyTorch's default, or oneDNN's.

By default PyTorch takes its BLAS, as a rule MKL, which has a slow path on some processors. oneDNN comes with PyTorch as
well, for bfloat16 and convolutions, and multiplies float32 matrices by float32 arithmetic too. The two add in different
orders: the last digits of a training depend on the choice, its accuracy does not.

The choice holds for this process. It replaces the forward passes of the classes nn.Linear and, of transformers, Conv1D;
models, their parameters and their files stay as they are.
"""

import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from types import ModuleType, TracebackType
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from .util.errors import UserError

LinearKernel = Literal["aten", "onednn"]
_LEAST_ROWS = 16  # below, reading W takes the time, and neither kernel is faster
_LEAST_PRODUCTS = 1 << 20  # R I O: below, the calls from Python take longer than oneDNN can save
_CONV1D_MODULE = "transformers.pytorch_utils"

_C: Any = torch._C
_chosen: LinearKernel = "aten"
_replaced: dict[Any, Callable[..., Tensor]] = {}  # class -> its own forward pass


class set_linear_kernel:  # noqa: N801  a function to whoever calls it, as torch.set_grad_enabled is
    """Choose the kernel of float32 linear maps on the CPU, for this process; in a `with` statement, for its body.

    Args:
        kernel: aten, PyTorch's default; or onednn, for nn.Linear and for the Conv1D of transformers.

    oneDNN takes plain float32 tensors on the CPU, with at least 16 rows and 2**20 products. Everything else is
    computed as before: other devices and types, autocast, function transforms, a graph that `torch.export` or
    `torch.jit` records. `torch.compile` takes the kernel that is chosen when it compiles. Gradients of gradients are
    computed by PyTorch's default.

    Raises:
        ValueError: the kernel is unknown.
        UserError: this PyTorch has no oneDNN.
    """

    def __init__(self, kernel: LinearKernel) -> None:
        global _chosen
        if kernel not in get_args(LinearKernel):
            raise ValueError(f"the linear kernel {kernel!r} is none of {', '.join(get_args(LinearKernel))}")
        if kernel == "onednn" and not torch.backends.mkldnn.is_available():
            raise UserError("the linear kernel onednn needs a PyTorch that is built with oneDNN: take aten")
        self.previous: LinearKernel = _chosen
        _chosen = kernel
        if kernel == "onednn":
            _replace(nn.Linear, _linear_forward)
            if _CONV1D_MODULE in sys.modules:
                _replace_conv1d()
            elif not any(isinstance(finder, _Conv1DFinder) for finder in sys.meta_path):
                sys.meta_path.insert(0, _Conv1DFinder())
        else:
            for kind, forward in _replaced.items():
                kind.forward = forward
            _replaced.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        set_linear_kernel(self.previous)


def get_linear_kernel() -> LinearKernel:
    """Return the kernel of float32 linear maps on the CPU: aten or onednn."""
    return _chosen


class _Conv1DFinder(MetaPathFinder):
    """Replaces Conv1D's forward pass once its module is imported, which may be later than the choice."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _CONV1D_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                if _chosen == "onednn":
                    _replace_conv1d()

            spec.loader.exec_module = execute_and_replace
        return spec


def _replace_conv1d() -> None:
    _replace(sys.modules[_CONV1D_MODULE].Conv1D, _conv1d_forward)


def _replace(kind: Any, made_from: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
    if kind not in _replaced:
        _replaced[kind] = kind.forward
        kind.forward = made_from(kind.forward)


@cache  # a compiled graph knows a function by its identity
def _linear_forward(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(own)
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if _takes(input, self.weight, self.bias, self.weight.shape[-1]):
            return _linear(input, self.weight, self.bias)
        return own(self, input)

    return forward


@cache
def _conv1d_forward(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(own)
    def forward(self: Any, x: Tensor) -> Tensor:
        if _takes(x, self.weight, self.bias, self.weight.shape[0]):
            return _linear(x, self.weight.t(), self.bias)
        return own(self, x)

    return forward


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None, d_in: int) -> bool:
    """Return whether oneDNN computes this map, of x (..., d_in)."""
    return (
        (torch.compiler.is_compiling() or not _is_watched())  # first: a tracer records all that follows
        and _is_plain(x)
        and _is_plain(weight)
        and (bias is None or _is_plain(bias))
        and (x.dim() > 1 and weight.dim() == 2 and x.shape[-1] == d_in > 0)
        and (rows := x.numel() // d_in) >= _LEAST_ROWS
        and rows * weight.numel() >= _LEAST_PRODUCTS
        and not torch.is_autocast_enabled("cpu")
    )


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    )


def _is_watched() -> bool:
    """Return whether more than eager autograd reads the calls: a mode, a function transform, forward mode, a tracer."""
    return (
        _C._len_torch_function_stack() > 0
        or _C._len_torch_dispatch_stack() > 0
        or _C._functorch.maybe_current_level() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or _C._is_tracing()
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute y (..., O) of x (..., I), W (O, I), b (O,)."""
    rows = x.reshape(-1, x.shape[-1])  # (R, I)
    y = _Linear.apply(rows, weight, bias) if torch.is_grad_enabled() else _product(rows, weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """y (R, O) of x (R, I), W (O, I), b (O,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        again = torch.is_grad_enabled()  # this pass is differentiated in its turn: oneDNN's product has no derivative
        grad_x = grad_weight = grad_bias = None
        if for_x:
            grad_x = grad @ weight if again else _product(grad, weight.t())
        if for_weight:
            grad_weight = grad.t() @ x if again else _weight_gradient(grad, x)
        if for_bias:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Compute G^T x (O, I) of G (R, O) and x (R, I)."""
    # A product copies a left side that is transposed, and none on the right: the narrower one goes to the left.
    return _product(x.t(), grad.t()).t() if x.shape[1] < grad.shape[1] else _product(grad.t(), x.t())


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute A B^T + b (M, N) of A (M, K) and B (N, K), which may be views of any strides, in float32."""
    if torch.compiler.is_compiling():
        return torch.ops.tapernorm.onednn_product(left, right, bias)
    return _onednn(left, right, bias)


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(left, right, bias, "none", [], "")


# The compiler has a form of oneDNN's operator for frozen weights alone. Under a name of our own it calls it as it is.
_OPERATORS = torch.library.Library("tapernorm", "DEF")
_OPERATORS.define("onednn_product(Tensor left, Tensor right, Tensor? bias) -> Tensor")
_OPERATORS.impl("onednn_product", _onednn, "CPU")


@torch.library.register_fake("tapernorm::onednn_product", lib=_OPERATORS)
def _shape_of_product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[0])
