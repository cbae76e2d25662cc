"""Quantiles of losses, in which a loss that is not finite counts as larger than any number."""

import math

import numpy as np
import torch
from torch import Tensor

_DROPPED_BITS = 10  # bits that `rounded` drops of the 23 bits of a float32's mantissa
RESOLUTION = 2.0**-14  # largest error of `rounded`, relative to the loss


def rounded(losses: Tensor) -> Tensor:
    """Round losses to float32 values within a relative error of `RESOLUTION`, as the published quantiles need.

    Each loss takes the middle of its bucket, whose width is 2^-13 of the loss. Below 1e-38 the absolute error is at
    most 1e-38. inf and NaN become inf.
    """
    # The bits of a non-negative float32, read as an integer, have the order of the values. abs removes -0, whose bits
    # do not.
    bits = losses.to(torch.float32).abs().view(torch.int32) >> _DROPPED_BITS
    middles = (bits << _DROPPED_BITS) + (1 << (_DROPPED_BITS - 1))
    return comparable(middles.view(torch.float32))


def comparable(losses: Tensor) -> Tensor:
    """Return the losses with inf in place of every loss that is not finite."""
    return torch.where(losses.isfinite(), losses, math.inf)


def quantile(losses: Tensor, q: float) -> float:
    """Return the q quantile of `comparable` losses, linear between neighbours; inf or NaN if it reaches infinite ones.

    `losses` (n,) are reordered in place, because a copy would double the memory of an evaluation.
    """
    values = losses.numpy()
    # As an array, q stays in float64: a number would take the dtype of the losses, and miss its rank among many.
    low, high = (
        float(np.quantile(values, np.array(q), method=method, overwrite_input=True)) for method in ("lower", "higher")
    )
    return low if low == high else low + q * (len(values) - 1) % 1 * (high - low)
