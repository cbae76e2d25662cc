"""The interface of methods that change a model's norms during training: a taper, or FakeLN's staged removal."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from tapernorm.norms import Form
from tapernorm.taper import Taper


class NormDriver(Protocol):
    """A method that changes the norms of one model; its effect at step k depends only on k and on its state."""

    @property
    def constants(self) -> dict[str, float]: ...  # norm -> constant that replaces its per-token scale; NaN until frozen

    @property
    def forms(self) -> int: ...  # number of forms of the norms in a run, each a graph of torch.compile

    @property
    def scale_target(self) -> Tensor | None: ...  # s_tgt of the fixed-target scale loss, a scalar; None: no such loss

    def set_step(self, step: int) -> None:
        """Set the norms to their form at optimizer step `step`, before that step's forward pass."""

    def observe(self) -> AbstractContextManager[None]:
        """Collect statistics in the training passes of one optimizer step, and update the averages once at its end."""
        ...

    def auxiliary_loss(self, tokens: Tensor) -> Tensor:
        """Return the method's weighted auxiliary loss of the last forward pass over `tokens` (B, T), a scalar."""
        ...

    def row(self) -> dict[str, float | None]:
        """Return the entries of a metrics row about the norms."""
        ...

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the optimizer; raise UserError if it lacks a parameter of these norms."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the model's own state dict lacks, as plain tensors and numbers."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""


class TaperDriver:
    """A `Taper` with the interface of `NormDriver`."""

    forms = len(Form)  # observe, mix and linear

    def __init__(self, taper: Taper) -> None:
        self.taper = taper
        self.set_step, self.observe, self.check = taper.set_step, taper.observe, taper.check
        self.state_dict, self.load_state_dict = taper.state_dict, taper.load_state_dict

    @property
    def constants(self) -> dict[str, float]:
        return self.taper.constants

    @property
    def scale_target(self) -> Tensor:
        return self.taper.scale_target

    def auxiliary_loss(self, tokens: Tensor) -> Tensor:
        """Return the scale loss, which does not depend on `tokens`."""
        return self.taper.anchor_loss()

    def row(self) -> dict[str, float | None]:
        """Return the gate and the scale target, which is None until it is set."""
        target = self.taper.scale_target.item()
        return {"gate": self.taper.gate.item(), "scale_target": None if math.isnan(target) else target}


def driver_of(changes: Taper | NormDriver | None) -> NormDriver | None:
    """Return `changes` as a driver: a taper in its adapter, a driver as it is, None for unchanged norms."""
    return TaperDriver(changes) if isinstance(changes, Taper) else changes


def norms_told(driver: NormDriver | None, constant: str = "c") -> dict[str, Any]:
    """Return the entries of result.json about the norms: the scale target, and each norm's constant as `constant`."""
    target = None if driver is None else driver.scale_target
    constants = {} if driver is None else driver.constants
    return {
        "norms": {site: {constant: value} for site, value in constants.items()},
        "scale_target": None if target is None else target.item(),
    }
