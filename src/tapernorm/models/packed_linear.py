"""The linear maps of a packed decoder: several maps of one input as one, in their own dtype or with int8 weights.

N outputs, K inputs.
"""

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..util.errors import UserError

_ONEDNN = torch.ops.mkldnn  # the operators that torch.compile uses for frozen linear maps
_INT8_PRODUCT = torch._weight_int8pack_mm  # pyright: ignore[reportPrivateImportUsage]
_BLOCKED_BYTES = 1 << 20  # a smaller weight fits the CPU cache, and oneDNN's call costs more than its layout saves
_LARGEST = 127  # -128 stays unused, so that a weight and its negative are rounded alike
_INT8_INPUTS = 16  # PyTorch's int8 kernel reads this many at once, also past the end of a shorter row


class PackedLinear(nn.Module):
    """Linear maps of one input packed into one, with concatenated outputs and frozen weights.

    In float32 on a CPU, a weight that exceeds the cache is stored column by column. A product with one row then reads
    it as one stream. A product with more rows uses a second copy in oneDNN's blocked layout, unless it is compiled.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        self.weight = _frozen(_stacked_weights(layers))  # (N, K)
        self.bias = _stacked_biases(layers)
        self._blocked: Tensor | None = None
        self._lay_out()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the packed map to x (..., K)."""
        one_row = x.numel() == x.shape[-1]
        if self._blocked is None or one_row or torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)
        return _ONEDNN._linear_pointwise(x, self._blocked, self.bias, "none", [], "")

    def _lay_out(self) -> None:
        on_cpu = self.weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        if on_cpu and self.weight.dtype is torch.float32 and self.weight.nbytes >= _BLOCKED_BYTES:
            self._blocked = _ONEDNN._reorder_linear_weight(self.weight.contiguous())
            self.weight = _frozen(self.weight.t().contiguous().t())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._blocked = None
        super()._apply(fn, recurse)
        self._lay_out()
        return self


class Int8Linear(nn.Module):
    """`PackedLinear` with int8 weights, a scale for each output, and activations in bfloat16.

    It computes y = bf16(s * (q @ bf16(x))) + b, with sums in float32, and returns the dtype of x. PyTorch's int8 kernel
    is fast for bfloat16 activations alone. With float32 activations it is slower than a float32 map.

    Raises:
        UserError: the weights are on another device than a CPU, or are not finite.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        if (device := layers[0].weight.device).type != "cpu":
            raise UserError(f"int8 weights need a model on a CPU, and this one is on {device}: move it to the CPU")
        q, scale = quantise(_stacked_weights(layers))
        self.inputs = q.shape[1]
        self.weight = _frozen(F.pad(q, (0, -self.inputs % _INT8_INPUTS)))  # (N, K and zeros)
        self.scale = _frozen(scale)  # (N,)
        self.bias = _stacked_biases(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the packed map to x (..., K)."""
        weight, scale = self.weight, self.scale
        if scale.dtype is not torch.bfloat16:  # after a move to another dtype
            scale = scale.to(torch.bfloat16)
        rows = x.reshape(-1, self.inputs).to(torch.bfloat16)
        if missing := weight.shape[1] - self.inputs:
            rows = F.pad(rows, (0, missing))
        y = _INT8_PRODUCT(rows.contiguous(), weight, scale).to(x.dtype)
        y = y.view(*x.shape[:-1], len(scale))
        return y if self.bias is None else y + self.bias


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return q (N, K) int8 and s (N,) bfloat16 with s q near `weight` (N, K): one symmetric scale per output channel.

    s_n = max_k |W_nk| / 127 is rounded to bfloat16, the kernel's dtype of scales, before q = round(W / s). The rounding
    of s therefore adds no error.

    Raises:
        UserError: a weight is not finite.
    """
    wide = weight.detach().double()
    largest = wide.abs().amax(dim=1)
    if not largest.isfinite().all():
        raise UserError("int8 weights need finite weights, and some of this model are not: load or train it again")
    scale = (largest / _LARGEST).to(torch.bfloat16)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    q = (wide / scale.double()[:, None]).round().clamp(-_LARGEST, _LARGEST)
    return q.to(torch.int8), scale


def _stacked_weights(layers: tuple[nn.Linear, ...]) -> Tensor:
    """Concatenate the weights of `layers`. A single weight is shared, not copied."""
    parts = [layer.weight.detach() for layer in layers]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _stacked_biases(layers: tuple[nn.Linear, ...]) -> nn.Parameter | None:
    if all(layer.bias is None for layer in layers):
        return None
    parts = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    return _frozen(torch.cat([part.detach() for part in parts]))


def _frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
