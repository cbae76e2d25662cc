"""What the linear maps alone are worth as the taper starts: the judge of a calibration.

    jump = CE_valid(g = 0) - CE_valid(g = 1), the weights being those at k_start, just calibrated

Nothing has been trained at g < 1 yet, so the jump is the calibration's alone. It is measured in passing, by the run
that the taper belongs to, and shifts none of its numbers but its time.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tapernorm.taper import Taper
from tapernorm.util.errors import UserError

from ..training.validation_loss import Evaluation


class ScoredTaper(Taper):
    """A taper that has its model scored in both forms in the moment of its calibration."""

    validate: Callable[[], Evaluation]  # scores the model as it stands; set by whoever attaches
    losses: tuple[float, float] | None = None  # CE at g = 1 and at g = 0, nats per token; None before k_start

    def calibrate(self) -> None:
        """As ever; then scores the model at g = 1 and at g = 0, and leaves the gate where it was.

        Raises:
            UserError: as ever.
            Stopped: while it scores; the taper then counts as uncalibrated, so that all of it is done again.
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
        """For result.json: the two losses and the jump; null where one is not finite.

        Raises:
            UserError: the taper has not started.
        """
        if self.losses is None:
            raise UserError("the taper has not started, and the loss jump is measured where it does, at k_start")
        standard, linear = self.losses
        values = {
            "taper_start_ce_norms": standard,
            "taper_start_ce_linear": linear,
            "taper_start_jump": linear - standard,
        }
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        return {name: {"value": value, "unit": "nats/token"} for name, value in finite.items()}

    def state_dict(self) -> dict[str, Any]:
        """Also the losses, so that a resumed run still knows them."""
        return {**super().state_dict(), "losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rest = dict(state)
        losses = rest.pop("losses", None)
        super().load_state_dict(rest)
        self.losses = None if losses is None else (losses[0], losses[1])
