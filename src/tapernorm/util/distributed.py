"""A sum over the processes that train one model together.

A process by itself is rank 0 of 1, and keeps what it has. Every rank calls these in the same order.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import UserError

_LARGE = 1 << 20  # bytes: a tensor of this size or more is summed where it is, smaller ones travel together


def count() -> int:
    """How many processes train the model."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


@torch.no_grad()
def sum_over_ranks(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the ranks, in its own dtype; all give the same shapes in the same order."""
    if count() == 1:
        return
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= _LARGE and tensor.is_contiguous():
            sum_in_place(tensor)
        else:
            small.setdefault(tensor.dtype, []).append(tensor)
    for together in small.values():
        flat = torch.cat([tensor.flatten() for tensor in together])
        sum_in_place(flat)
        totals = flat.split([tensor.numel() for tensor in together])
        for tensor, total in zip(together, totals, strict=True):
            tensor.copy_(total.view_as(tensor))


def sum_in_place(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over the ranks."""
    with in_contact():
        dist.all_reduce(tensor)


@contextmanager
def in_contact() -> Iterator[None]:
    """An exchange with the other ranks."""
    try:
        yield
    except RuntimeError as error:  # what gloo and NCCL raise
        raise UserError(
            f"rank {rank()} of {count()} lost another one ({str(error).splitlines()[0]}): see what that one said, or "
            "what ended it, and run the same command again; it goes on from the last checkpoint"
        ) from error
