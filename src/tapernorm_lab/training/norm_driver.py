"""What the trainer asks of whatever changes a model's norms while it trains: a taper, or FakeLN's staged removal."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from tapernorm.token_mask import TokenMask


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
