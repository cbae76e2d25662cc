"""What the trainer asks of whatever changes a model's norms while it trains: a taper, or FakeLN's staged removal."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .errors import UserError
from .saving import guard_saving, unguard_saving
from .tokenmask import TokenMask
from .wrappers import keep_from_broadcast, undo_keep_from_broadcast

DRIVER = "_tapernorm"  # where a model keeps its driver


def require_free(model: nn.Module) -> None:
    """Raise UserError where `model` carries a driver already."""
    if DRIVER in model.__dict__:
        raise UserError("this model is attached already; a model carries one driver")


def install(driver: "NormDriver", model: nn.Module) -> None:
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


class NormDriver(Protocol):
    """Drives the norms of one model; what it does at optimizer step k is a function of k and of its state."""

    @property
    def tokens(self) -> TokenMask:
        """Which tokens of the last forward pass count."""
        ...

    @property
    def constants(self) -> dict[str, float]:
        """The constant that stands for each norm's per-token scale; NaN until frozen."""
        ...

    @property
    def forms(self) -> int:
        """How many forms the norms take over a run: the graphs that torch.compile builds of the training step."""
        ...

    @property
    def scale_target(self) -> Tensor | None:
        """s_tgt of the fixed-target scale loss, a scalar; None where there is no such loss."""
        ...

    def set_step(self, step: int) -> None:
        """Bring the norms into their form at optimizer step `step`, before that step's forward pass."""
        ...

    def observe(self) -> AbstractContextManager[None]:
        """Collect statistics in the training passes of one optimizer step; one update at its end."""
        ...

    def auxiliary_loss(self, tokens: Tensor) -> Tensor:
        """The method's own loss, weighted, of the last forward pass over `tokens` (B, T); a scalar."""
        ...

    def row(self) -> dict[str, float | None]:
        """What a line of metrics says about the norms."""
        ...

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UserError where the optimizer lacks a parameter of these norms."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the model's own state dict does not hold, as plain tensors and numbers."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        ...
