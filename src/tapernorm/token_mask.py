"""Which tokens of a forward pass count: statistics and scale losses leave padding out.

B batch, T time, D width. `counted` below is whether each token counts, (..., 1) bool; None: all of them do.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .util.errors import UserError
from .util.wrappers import refuse_wrapper

_ARGUMENT = "attention_mask"
_CACHES = ("cache", "past_key_values")  # an argument that holds the keys of earlier tokens


class TokenMask:
    """The mask of the last forward pass of a model, read from the call of its trunk.

    A position counts where `attention_mask` is not 0, whatever its label; without a mask every position counts.
    `given` puts other masks in its place.
    """

    def __init__(self, trunk: nn.Module) -> None:
        self.mask: Any = None  # (B, T), or wider where a cache holds earlier tokens
        self._cached = False
        self._given: list[Tensor] | None = None  # of the training passes to come
        names = list(inspect.signature(trunk.forward).parameters)
        self._place = names.index(_ARGUMENT) if _ARGUMENT in names else len(names)
        self._handle = trunk.register_forward_pre_hook(self._read, with_kwargs=True)

    def remove(self) -> None:
        """Read no mask any more."""
        self._handle.remove()

    @contextmanager
    def given(self, masks: Tensor | Sequence[Tensor] | None) -> Iterator[None]:
        """Inside, training passes take these masks, (B, T) each, one after another; None: those of their calls."""
        if not isinstance(masks, Tensor | Sequence | None):
            raise UserError(f"mask must be a (B, T) tensor or a list of them, got a {type(masks).__name__}")
        self._given = None if masks is None else [masks] if isinstance(masks, Tensor) else list(masks)
        try:
            yield
            if self._given:
                raise UserError(f"{len(self._given)} masks are left: give observe(mask=...) one for each forward pass")
        finally:
            self._given = None

    def counted(self, h: Tensor) -> Tensor | None:
        """Whether each token of the pass counts, (..., 1) for h (B, T, D) or (B T, D); None: all of them do."""
        mask = self.mask
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point():
            found = f"{tuple(mask.shape)} of {mask.dtype}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise UserError(
                f"{_ARGUMENT} is {found}, and statistics leave padding out by a (B, T) "
                "mask of integers or bools, 0 for padding: give that one as taper.observe(mask=...)"
            )
        rows, columns = mask.shape
        tokens = h[..., 0].numel()
        length = h.shape[1] if h.ndim > 2 else tokens // rows
        if rows * length != tokens or length > columns or (length < columns and not self._cached):
            raise UserError(
                f"{_ARGUMENT} is {(rows, columns)} and the norms read {tuple(h.shape[:-1])} tokens: give a mask with a "
                "value for each token, or as taper.observe(mask=...)"
            )
        return (mask[:, columns - length :] != 0).reshape(*h.shape[:-1], 1).to(h.device)

    def _read(self, trunk: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_wrapper(trunk)
        self._cached = any(kwargs.get(name) is not None for name in _CACHES)
        if self._given is None or not trunk.training:
            self.mask = kwargs.get(_ARGUMENT, args[self._place] if len(args) > self._place else None)
            return
        if not self._given:
            raise UserError("more forward passes than masks: give observe(mask=[...]) one for each forward pass inside")
        self.mask = self._given.pop(0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mask": None, "_given": None}  # of a pass, and no state


def in_backward() -> bool:
    """Whether a backward pass runs here: a forward inside it repeats an earlier one (activation checkpointing)."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def sum_over(values: Tensor, counted: Tensor | None) -> Tensor:
    """Sum of values (..., 1) over the tokens that count."""
    return values.sum() if counted is None else torch.where(counted, values, 0).sum()


def number_of(values: Tensor, counted: Tensor | None) -> int | Tensor:
    """How many tokens of values (..., 1) count."""
    return values.numel() if counted is None else counted.sum()


def mean_over(values: Tensor, counted: Tensor | None) -> Tensor:
    """Mean of values (..., 1) over the tokens that count; 0 without any."""
    return values.mean() if counted is None else sum_over(values, counted) / counted.sum().clamp(min=1)
