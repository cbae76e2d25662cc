"""What the trainer asks of whatever changes a model's norms while it trains: a taper, or FakeLN's staged removal."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from tapernorm.norms import Form
from tapernorm.taper import Taper


class NormDriver(Protocol):
    """Drives the norms of one model; what it does at optimizer step k is a function of k and of its state."""

    @property
    def constants(self) -> dict[str, float]: ...  # for each norm's per-token scale; NaN until frozen

    @property
    def forms(self) -> int: ...  # of the norms over a run: the graphs that torch.compile builds of the training step

    @property
    def scale_target(self) -> Tensor | None: ...  # s_tgt of the fixed-target scale loss, a scalar; None: no such loss

    def set_step(self, step: int) -> None:
        """Bring the norms into their form at optimizer step `step`, before that step's forward pass."""

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

    def state_dict(self) -> dict[str, Any]:
        """What the model's own state dict does not hold, as plain tensors and numbers."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""


class TaperDriver:
    """A taper as the trainer takes it."""

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
        """The scale loss, which needs no tokens."""
        return self.taper.anchor_loss()

    def row(self) -> dict[str, float | None]:
        """Gate and scale target, None until it is set."""
        target = self.taper.scale_target.item()
        return {"gate": self.taper.gate.item(), "scale_target": None if math.isnan(target) else target}


def driver_of(changes: Taper | NormDriver | None) -> NormDriver | None:
    """What drives the norms, as the trainer takes it: a taper in its adapter, FakeLN as it is, None for no change."""
    return TaperDriver(changes) if isinstance(changes, Taper) else changes


def norms_told(driver: NormDriver | None, constant: str = "c") -> dict[str, Any]:
    """What result.json says of the norms: the constant of each, by this name, and the scale target."""
    target = None if driver is None else driver.scale_target
    constants = {} if driver is None else driver.constants
    return {
        "norms": {site: {constant: value} for site, value in constants.items()},
        "scale_target": None if target is None else target.item(),
    }
