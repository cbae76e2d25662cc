"""A model carries one thing that changes its norms while it trains, and is guarded while it does."""

from typing import Any

from torch import nn

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
