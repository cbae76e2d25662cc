"""Quantiles of losses, where one that is not finite counts as larger than any number."""

import math

import numpy as np
import torch
from torch import Tensor

_DROPPED_BITS = 10  # of a float32's 23 of mantissa
RESOLUTION = 2.0**-14  # of `rounded`, relative to the loss


def rounded(losses: Tensor) -> Tensor:
    """Losses in float32, within `RESOLUTION` of theirs: quantiles of tokens were published at this resolution.

    Each takes the middle of its bucket, 2^-13 of its value wide (within 1e-38 below 1e-38); inf and NaN become inf.
    """
    # The bits of a float32 that is not negative, read as an integer, are in the order of the values. abs: rounding may
    # leave -0, whose bits are out of order.
    bits = losses.to(torch.float32).abs().view(torch.int32) >> _DROPPED_BITS
    middles = (bits << _DROPPED_BITS) + (1 << (_DROPPED_BITS - 1))
    return comparable(middles.view(torch.float32))


def comparable(losses: Tensor) -> Tensor:
    """The same with inf for every one that is not finite."""
    return torch.where(losses.isfinite(), losses, math.inf)


def quantile(losses: Tensor, q: float) -> float:
    """The q quantile of `comparable` losses, linear between neighbours; not finite where it reaches so far.

    `losses` (n,) are reordered in place: a copy would double what an evaluation holds.
    """
    values = losses.numpy()
    # As an array, q stays in float64: a number would take the dtype of the losses, and miss its rank among many.
    low, high = (
        float(np.quantile(values, np.array(q), method=method, overwrite_input=True)) for method in ("lower", "higher")
    )
    return low if low == high else low + q * (len(values) - 1) % 1 * (high - low)
