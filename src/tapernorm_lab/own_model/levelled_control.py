"""A control with the level loss of a taper: its gate stays at 1, so that the gate alone sets the two runs apart."""

from torch import nn

from tapernorm.architectures import select_norms
from tapernorm.taper import Taper, attach_norms

from .job import TaperJob


class LevelledControl(Taper):
    """A taper that computes its level loss and never moves its gate.

    Its norms compute the standard norm, bitwise. After the last step it leaves a plain model.

    Attributes:
        start: optimizer step at which the levels are fixed, k_start of the taper that this is a control for.
        steps: number of optimizer steps.
    """

    start: int  # set by whoever attaches
    steps: int

    def set_step(self, step: int) -> None:
        """Fix the levels from `start` on, and detach after the last step.

        Raises:
            UserError: nothing was observed before `start`.
        """
        if step >= self.start and not self.calibrated:
            self.calibrate()
        if step >= self.steps:
            self.detach()


def attach_control(model: nn.Module, job: TaperJob, *, fixed_at: int) -> LevelledControl:
    """Attach the level loss of `job` at the norms that its taper would replace, and return what drives it.

    Args:
        fixed_at: optimizer step at which the levels are fixed.

    Raises:
        UserError: the model cannot be tapered.
    """
    control = attach_norms(
        model,
        select_norms(model, final=job.final, sites=job.sites),
        schedule=None,
        ema_rate=job.train.ema_rate,
        level_weight=job.level_weight,
        kind=LevelledControl,
    )
    assert isinstance(control, LevelledControl)
    control.start, control.steps = fixed_at, job.steps
    return control
