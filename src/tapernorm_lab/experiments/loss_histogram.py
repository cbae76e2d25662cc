"""How any number of losses is distributed, in fixed memory: counts over the leading bits of their float32 values."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# The bits of a float32 that is not negative, read as an integer, are in the order of the values.
_KEPT_BITS = 22  # of 32: sign, 8 of exponent, 13 of mantissa
_SHIFT = 32 - _KEPT_BITS
_INFINITE = 0x7F800000 >> _SHIFT  # bucket of inf; NaN lies above it and is put there too
RESOLUTION = 2.0**-14  # half a bucket, relative to the loss


class LossHistogram:
    """Counts of losses that are not negative, in buckets 2^-13 of their value wide: 16 MiB, whatever is added.

    What is read back is the middle of a bucket, so it is within `RESOLUTION` of the loss (within 1e-38 below 1e-38).
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(_INFINITE + 1, dtype=torch.int64, device=device)

    def add(self, losses: Tensor) -> None:
        """Count every entry; inf and NaN count as larger than any number."""
        values = losses.flatten().to(torch.float32).abs()  # abs: rounding may leave -0, whose bits are out of order
        buckets = (values.view(torch.int32) >> _SHIFT).clamp_(max=_INFINITE)
        self._counts.index_add_(0, buckets, torch.ones_like(buckets, dtype=torch.int64))

    def quantile(self, q: float) -> float:
        """The q quantile, interpolated between neighbours in order as NumPy does; NaN where it is not finite."""
        upto = self._counts.cpu().cumsum(0)

        def ordered(rank: int) -> float:
            bucket = int(torch.searchsorted(upto, rank, right=True))
            if bucket == _INFINITE:
                return math.nan
            middle = torch.tensor((bucket << _SHIFT) + (1 << (_SHIFT - 1)), dtype=torch.int32)
            return middle.view(torch.float32).item()

        return quantile(ordered, int(upto[-1]), q)


def quantile(ordered: Callable[[int], float], count: int, q: float) -> float:
    """The q quantile of `count` values, `ordered(k)` the k-th smallest from 0, linear between neighbours."""
    position = q * (count - 1)
    rank = math.floor(position)
    low = ordered(rank)
    if position == rank:
        return low
    return low + (position - rank) * (ordered(rank + 1) - low)
