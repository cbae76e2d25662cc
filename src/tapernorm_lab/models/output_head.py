"""Output head and cross-entropy in one operator, chunk by chunk of tokens: no whole logit matrix is stored.

N tokens, D width, V vocabulary; x (N, D) is the input of the head, W (V, D) its weight, b (V,) its bias, z = x W^T + b.

The gradient by z is softmax(z) less the one-hot target, over the number of targets. It overwrites the logits of its
chunk, and the products with W and with x follow at once. So z is computed once, and one chunk of it lives at a time.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

IGNORED = -100  # target that does not count, as in F.cross_entropy
_CHUNK = {"cpu": 1 << 20}  # logits of a chunk that stays in a core's cache
_NARROW = 64  # most channels at which a product with (D, V) is faster than one with (V, D)
_LEAST_ROWS = 2  # times D
_CHUNK_ELSEWHERE = 1 << 26  # on a GPU, whose matrix products need many rows


def head_cross_entropy(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of targets (...) by the logits of hidden (..., D).

    Targets of `IGNORED` do not count. Logits are computed in the precision of autocast or of `hidden`, their softmax
    and the loss in float32 or wider.
    The gradient is computed in the forward pass, and no second derivative exists.
    """
    x, weight, bias = _operands(head, hidden)
    loss, *_ = _linear_cross_entropy(x, weight, bias, targets.reshape(-1))
    return loss


def logits_by_chunk(head: nn.Linear, hidden: Tensor) -> Iterator[Tensor]:
    """Yield the logits (n, V) of hidden (..., D), a chunk of tokens at a time, as the loss computes them."""
    x, weight, bias = _operands(head, hidden)
    for some in x.split(_rows(x, weight)):
        yield linear(some, weight, bias)


def _operands(head: nn.Linear, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return x, W and b as autocast would hand them to the linear map."""
    x, weight, bias = hidden.flatten(0, -2), head.weight, head.bias
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _rows(x: Tensor, weight: Tensor) -> int:
    """Return the tokens of a chunk. With fewer than 2 D, adding up the gradient by W takes time."""
    return max(_CHUNK.get(x.device.type, _CHUNK_ELSEWHERE) // len(weight), _LEAST_ROWS * x.shape[1])


@torch.library.custom_op("tapernorm_lab::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mean cross-entropy and its gradients by x, W and b (empty without one)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    counts = (targets != IGNORED)[:, None]  # (N, 1)
    counted = counts.to(x.dtype)
    places = targets.clamp(min=0)[:, None]
    losses = torch.empty(len(x), 1, dtype=wide, device=x.device)
    x_gradient = torch.empty_like(x)
    weight_gradient = torch.zeros(weight.shape, dtype=wide, device=x.device)
    if x.shape[1] <= _NARROW:
        weight_gradient = weight_gradient.view(weight.shape[::-1]).t()
    bias_gradient = torch.zeros(0 if bias is None else len(weight), dtype=wide, device=x.device)
    rows = _rows(x, weight)
    for first in range(0, len(x), rows):
        part = slice(first, first + rows)
        logits = linear(x[part], weight, bias).to(wide)
        largest = logits.amax(1, keepdim=True)
        at_target = logits.gather(1, places[part])
        torch.softmax(logits, 1, out=logits)
        # the largest probability is exp(largest - logsumexp)
        losses[part] = largest - logits.amax(1, keepdim=True).log() - at_target
        logits.scatter_add_(1, places[part], torch.full_like(at_target, -1))
        gradient = logits.to(x.dtype)
        x_gradient[part] = linear(gradient, weight.t()) * counted[part]
        theirs = x[part] * counted[part]
        if wide is x.dtype:
            weight_gradient.addmm_(gradient.t(), theirs)
        else:
            weight_gradient += gradient.t() @ theirs
        if bias is not None:
            bias_gradient += (counted[part].t() @ gradient)[0]
    number = counts.sum()
    loss = torch.where(counts, losses, 0).sum() / number
    gradients = (x_gradient, weight_gradient, bias_gradient)
    x_gradient, weight_gradient, bias_gradient = (g.div_(number).to(x.dtype).contiguous() for g in gradients)
    return loss, x_gradient, weight_gradient, bias_gradient


@_linear_cross_entropy.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    return loss, torch.empty_like(x), torch.empty_like(weight), x.new_empty(0 if bias is None else len(weight))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.biased = inputs[2] is not None
    ctx.save_for_backward(*output[1:])


def _scaled(ctx: Any, loss: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(other is not None for other in others):
        raise RuntimeError("head_cross_entropy has no second derivative")
    x, weight, bias = (gradient * loss.to(gradient.dtype) for gradient in ctx.saved_tensors)
    return x, weight, bias if ctx.biased else None, None


_linear_cross_entropy.register_autograd(_scaled, setup_context=_keep)
