"""The driver of a model: the object that changes its norms during training. A model carries at most one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.save_guard import guard_saving, unguard_saving
from .errors import UserError
from .wrappers import keep_from_broadcast, undo_keep_from_broadcast

DRIVER = "_tapernorm"  # the attribute of a model that holds its driver


def require_free(model: nn.Module) -> None:
    """Raise UserError if `model` carries a driver already."""
    if DRIVER in model.__dict__:
        raise UserError("this model is attached already: use its taper, or detach it before you attach another")


def install(driver: Any, model: nn.Module) -> None:
    """Store `driver` in `model`, so that a deep copy has its own, and guard saving and broadcasting."""
    model.__dict__[DRIVER] = driver
    guard_saving(model)
    keep_from_broadcast(model)


def uninstall(model: nn.Module) -> None:
    """Undo `install`, and remove the hook through which the driver reads masks."""
    driver = model.__dict__.pop(DRIVER, None)
    if driver is not None:
        driver.tokens.remove()
        undo_keep_from_broadcast(model)
    unguard_saving(model)


def require_trained(norms: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, remedy: str) -> None:
    """Raise UserError if the optimizer lacks a parameter of one of `norms`. `remedy` ends the message."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, norm in norms.items():
        for parameter, value in norm.named_parameters(recurse=False):
            if value.requires_grad and id(value) not in held:
                raise UserError(f"the optimizer does not train {name}.{parameter}: {remedy}")


def buffers_of(parts: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the buffers of each part under "part.buffer", as a driver's state names them. They are not copied."""
    return {f"{part}.{key}": buffer for part, module in parts.items() for key, buffer in module.named_buffers()}


def load_buffers(
    buffers: Mapping[str, Tensor], state: Mapping[str, Any], *, others: Sequence[str] = (), what: str
) -> None:
    """Copy `state` into `buffers`: all of them, or none if one does not fit.

    Args:
        buffers: the buffers to fill, by name.
        state: the values, by the same names.
        others: further names that the state must have.
        what: the kind of driver, for the message.

    Raises:
        UserError: the names differ, or a value is not a tensor of its buffer's shape.
    """
    if different := sorted(state.keys() ^ {*buffers, *others}):
        raise UserError(f"this {what} state belongs to another model: missing or unknown {', '.join(different)}")
    for name, buffer in buffers.items():
        value = state[name]
        found = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        if found != (expected := tuple(buffer.shape)):
            raise UserError(
                f"this {what} state belongs to another model: its {name} is {found}, and this model needs {expected}"
            )
    for name, buffer in buffers.items():
        buffer.copy_(state[name])
