"""The loss jump at the start of the taper, which measures the quality of a calibration.

    jump = CE_valid(g = 0) - CE_valid(g = 1), with the weights at k_start, just calibrated

Nothing has been trained at g < 1 yet, so that the jump depends on the calibration alone. The run that owns the taper
measures it; this changes none of its numbers except its time.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tapernorm.taper import Taper
from tapernorm.util.errors import UserError

from ..training.validation_loss import Evaluation


class ScoredTaper(Taper):
    """A taper that scores its model at g = 1 and at g = 0 when it is calibrated."""

    validate: Callable[[], Evaluation]  # scores the present model; the caller of attach sets it
    losses: tuple[float, float] | None = None  # CE at g = 1 and at g = 0, nats per token; None before k_start

    def calibrate(self) -> None:
        """Calibrate, then score the model at g = 1 and at g = 0, and restore the gate.

        Raises:
            UserError: as `Taper.calibrate`.
            Stopped: a signal arrived during scoring; the taper then counts as uncalibrated, and all of it is repeated.
        """
        super().calibrate()
        before, form = self._gate.value.item(), self._gate.form
        losses: list[float] = []
        try:
            for gate in (1.0, 0.0):
                self._gate.set(gate)
                losses.append(self.validate().ce)
        except BaseException:
            self.calibrated = False
            raise
        finally:
            self._gate.set(before, form)
        self.losses = losses[0], losses[1]

    def values(self) -> dict[str, dict[str, Any]]:
        """Return the entries of result.json: the two losses and the jump, null if not finite.

        Raises:
            UserError: the taper has not started.
        """
        if self.losses is None:
            raise UserError("the taper has not started: the loss jump is measured at its start, k_start")
        standard, linear = self.losses
        values = {
            "taper_start_ce_norms": standard,
            "taper_start_ce_linear": linear,
            "taper_start_jump": linear - standard,
        }
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        return {name: {"value": value, "unit": "nats/token"} for name, value in finite.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the taper's state and the losses, which a resumed run needs."""
        return {**super().state_dict(), "losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rest = dict(state)
        losses = rest.pop("losses", None)
        super().load_state_dict(rest)
        self.losses = None if losses is None else (losses[0], losses[1])
