"""Sums over the processes that train one model together.

A single process is rank 0 of 1, and its sums are its own values. Every rank must call these functions in one order.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import UserError

_LARGE = 1 << 20  # bytes: larger tensors are summed in place, smaller ones in one joint buffer


def count() -> int:
    """Return the number of processes that train the model."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


@torch.no_grad()
def sum_over_ranks(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the ranks, in its own dtype. All ranks pass the same shapes in one order."""
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
    """Turn an error in an exchange with other ranks into a UserError that names the rank."""
    try:
        yield
    except RuntimeError as error:  # what gloo and NCCL raise
        raise UserError(
            f"rank {rank()} of {count()} lost the connection to another rank ({str(error).splitlines()[0]}): read the "
            "other rank's message, and run the same command again. It resumes from the last checkpoint"
        ) from error
