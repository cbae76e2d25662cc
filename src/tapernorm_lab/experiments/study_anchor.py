"""A control: the scale loss of a taper whose norms all stay.

    L = CE + lambda E_{b,t} (s - s_tgt)^2 from k_start on, s_tgt frozen there, s what the final norm divides by

A taper (+aux) changes two things at once: its norms go, and the scale loss pulls at the pre-logit stream. What a
Baseline gains by that loss alone, nothing tapered, is no merit of the norms' being gone.
"""

from tapernorm.taper import Taper


class ScaleLossAlone(Taper):
    """A taper of no norms: scale target and scale loss by its schedule, while its gate stays at 1."""

    def set_step(self, step: int) -> None:
        """Freeze the scale target at the first step at or after `schedule.start`, before its forward pass.

        Raises:
            UserError: no scale was observed before.
        """
        assert self.schedule is not None
        if step >= self.schedule.start and not self.calibrated:
            self.calibrate()
