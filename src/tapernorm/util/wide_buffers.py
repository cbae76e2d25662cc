"""Buffers that keep their precision when a model is moved to a narrower dtype."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn


class WideBuffers(nn.Module):
    """Base of modules whose own floating-point buffers `.to()` may widen and never narrows.

    `model.bfloat16()` must not round gates, statistics and rotary angles.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        before: dict[str, Any] = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype.itemsize < old.dtype.itemsize:
                self._buffers[name] = old.to(new.device)
        return self
