"""The mask of a forward pass: statistics and scale losses ignore padding.

B batch, T time, D width. `counted` says which tokens count, (..., 1) bool. None means all of them.
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
_CACHES = ("cache", "past_key_values")  # arguments that hold keys and values of earlier tokens


class TokenMask:
    """The mask of a model's last forward pass, read from the arguments of its trunk.

    A position counts where `attention_mask` is not 0, whatever its label. Without a mask, every position counts.
    `given` supplies other masks.
    """

    def __init__(self, trunk: nn.Module) -> None:
        self.mask: Any = None  # (B, T), or wider where a cache holds earlier tokens
        self._cached = False
        self._given: list[Tensor] | None = None  # masks of the next training passes
        names = list(inspect.signature(trunk.forward).parameters)
        self._place = names.index(_ARGUMENT) if _ARGUMENT in names else len(names)
        self._handle = trunk.register_forward_pre_hook(self._read, with_kwargs=True)

    def remove(self) -> None:
        """Stop reading masks: remove the hook."""
        self._handle.remove()

    @contextmanager
    def given(self, masks: Tensor | Sequence[Tensor] | None) -> Iterator[None]:
        """Use these masks (B, T) for the training passes inside, in turn. None uses the passes' own.

        Raises:
            UserError: `masks` is of another type, or fewer or more than the training passes inside.
        """
        if not isinstance(masks, Tensor | Sequence | None):
            raise UserError(f"mask must be a (B, T) tensor or a list of them, got a {type(masks).__name__}")
        self._given = None if masks is None else [masks] if isinstance(masks, Tensor) else list(masks)
        try:
            yield
            if self._given:
                raise UserError(
                    f"observe(mask=...) got {len(self._given)} masks too many: give one for each forward pass inside"
                )
        finally:
            self._given = None

    def counted(self, h: Tensor) -> Tensor | None:
        """Return which tokens of the pass count, (..., 1) bool for h (B, T, D) or (B T, D). None means all of them.

        Raises:
            UserError: the mask is not (B, T) of integers or bools, or does not fit h.
        """
        mask = self.mask
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point():
            found = f"{tuple(mask.shape)} of {mask.dtype}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise UserError(
                f"{_ARGUMENT} is {found}, and the statistics need a (B, T) mask of integers or bools, 0 for padding: "
                "give one as taper.observe(mask=...)"
            )
        rows, columns = mask.shape
        tokens = h[..., 0].numel()
        length = h.shape[1] if h.ndim > 2 else tokens // rows
        if rows * length != tokens or length > columns or (length < columns and not self._cached):
            raise UserError(
                f"{_ARGUMENT} is {(rows, columns)} and the norms read {tuple(h.shape[:-1])} tokens: give a mask with "
                "one value for each token, in the call or as taper.observe(mask=...)"
            )
        return (mask[:, columns - length :] != 0).reshape(*h.shape[:-1], 1).to(h.device)

    def _read(self, trunk: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_wrapper(trunk)
        self._cached = any(kwargs.get(name) is not None for name in _CACHES)
        if self._given is None or not trunk.training:
            self.mask = kwargs.get(_ARGUMENT, args[self._place] if len(args) > self._place else None)
            return
        if not self._given:
            raise UserError("observe(mask=...) got too few masks: give a list with one for each forward pass inside")
        self.mask = self._given.pop(0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mask": None, "_given": None}  # these belong to a pass, not to the state


def in_backward() -> bool:
    """Return whether a backward pass runs. A forward pass inside it is a recomputation (activation checkpointing)."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def sum_over(values: Tensor, counted: Tensor | None) -> Tensor:
    """Return the sum of values (..., 1) over the tokens that count."""
    return values.sum() if counted is None else torch.where(counted, values, 0).sum()


def number_of(values: Tensor, counted: Tensor | None) -> int | Tensor:
    """Return how many tokens of values (..., 1) count."""
    return values.numel() if counted is None else counted.sum()


def mean_over(values: Tensor, counted: Tensor | None) -> Tensor:
    """Return the mean of values (..., 1) over the tokens that count, or 0 if none does."""
    return values.mean() if counted is None else sum_over(values, counted) / counted.sum().clamp(min=1)
