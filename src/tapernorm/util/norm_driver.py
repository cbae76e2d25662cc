"""A model carries one thing that changes its norms while it trains, and is guarded while it does."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.save_guard import guard_saving, unguard_saving
from .errors import UserError
from .wrappers import keep_from_broadcast, undo_keep_from_broadcast

DRIVER = "_tapernorm"  # where a model keeps its driver


def require_free(model: nn.Module) -> None:
    """Raise UserError where `model` carries a driver already."""
    if DRIVER in model.__dict__:
        raise UserError("this model is attached already; a model carries one driver")


def install(driver: Any, model: nn.Module) -> None:
    """Let `model` carry `driver`, so that a deep copy has a driver of its own; guard what leaves the process."""
    model.__dict__[DRIVER] = driver
    guard_saving(model)
    keep_from_broadcast(model)


def uninstall(model: nn.Module) -> None:
    """Take back what `install` has done to `model`, and the hook by which its driver reads masks."""
    driver = model.__dict__.pop(DRIVER, None)
    if driver is not None:
        driver.tokens.remove()
        undo_keep_from_broadcast(model)
    unguard_saving(model)


def require_trained(norms: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, remedy: str) -> None:
    """Raise UserError where the optimizer lacks a parameter of one of `norms`."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, norm in norms.items():
        for parameter, value in norm.named_parameters(recurse=False):
            if value.requires_grad and id(value) not in held:
                raise UserError(f"the optimizer does not train {name}.{parameter}: {remedy}")


def buffers_of(parts: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The buffers of each part, themselves, under "part.buffer": what a driver's state holds."""
    return {f"{part}.{key}": buffer for part, module in parts.items() for key, buffer in module.named_buffers()}


def load_buffers(
    buffers: Mapping[str, Tensor], state: Mapping[str, Any], *, others: Sequence[str] = (), what: str
) -> None:
    """Copy `state` into `buffers`, all of them, or none.

    Args:
        others: names that the state has beside those of the buffers.
        what: the driver, for the message.

    Raises:
        UserError: the names differ, or a value is no tensor of its buffer's shape.
    """
    if different := sorted(state.keys() ^ {*buffers, *others}):
        raise UserError(f"this {what} state belongs to another model: {', '.join(different)}")
    for name, buffer in buffers.items():
        value = state[name]
        found = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        if found != (expected := tuple(buffer.shape)):
            raise UserError(
                f"this {what} state belongs to another model: {name} is {found} in it, and {expected} in this one"
            )
    for name, buffer in buffers.items():
        buffer.copy_(state[name])
