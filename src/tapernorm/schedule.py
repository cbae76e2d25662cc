"""Gate, equation (3) of `taper`, and learning rate, as pure functions of the optimizer step."""

import math
import operator
from dataclasses import dataclass
from typing import Any, Self

HORIZON = 0.02  # of the steps before k_start: what running means reach back over, where nothing else is said


@dataclass(frozen=True)
class GateSchedule:
    """The window in which the gate falls: g = 1 before `start`, then a half cosine, and g = 0 from `end` on.

    Attributes:
        start: k_start, the first optimizer step in the mixing form. The calibration needs a step before it.
        end: k_end, the first optimizer step at g = 0.

    Raises:
        ValueError: start or end is not an integer, or 1 <= start < end does not hold.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if (known := whole_number(value := getattr(self, name))) is None:
                raise ValueError(f"gate schedule needs a whole number of optimizer steps as {name}, got {value!r}")
            object.__setattr__(self, name, known)
        if not 1 <= self.start < self.end:
            raise ValueError(
                f"gate schedule needs 1 <= start < end, got start {self.start} and end {self.end}: "
                "train for more steps, or raise start_fraction or end_fraction"
            )

    @classmethod
    def from_fractions(cls, steps: int, start_fraction: float, end_fraction: float) -> Self:
        """Return the schedule with k_start = round(start_fraction N) and k_end = round(end_fraction N), N = `steps`.

        Raises:
            ValueError: a fraction is not finite, or 1 <= k_start < k_end does not hold.
        """
        if not math.isfinite(start_fraction + end_fraction):
            raise ValueError(
                f"gate schedule needs finite fractions, got start_fraction {start_fraction} and end_fraction "
                f"{end_fraction}"
            )
        return cls(round(start_fraction * steps), round(end_fraction * steps))


def whole_number(value: Any) -> int | None:
    """Return `value` as an int if its type is an integer type of any library, else None. A bool gives None."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def gate_at(step: int, schedule: GateSchedule) -> float:
    """Return the gate g(k) at optimizer step k = `step`, equation (3).

    g(k) is 1 before k_start and 0 from k_end on. Between them it is 1/2 (1 + cos(pi (k - k_start)/(k_end - k_start))).
    """
    if step < schedule.start:
        return 1.0
    if step >= schedule.end:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * (step - schedule.start) / (schedule.end - schedule.start)))


def ema_rate_over(start: int, horizon: float = HORIZON) -> float:
    """Return m = 1 / max(2, H k_start), the rate of running means over a fraction H = `horizon` of the gate's warm-up.

    The warm-up is the k_start = `start` steps at g = 1. The mean reaches back over 1/m steps, at least two.
    """
    return 1 / max(2.0, horizon * start)


def default_ema_rate(schedule: object) -> float:
    """Return m where none is given: that of the default horizon, or the paper's 0.01 without a schedule."""
    return ema_rate_over(schedule.start) if isinstance(schedule, GateSchedule) else 0.01


def lr_at(step: int, *, steps: int, peak: float, warmup: int, floor: float = 0.0) -> float:
    """Return the learning rate at optimizer step k = `step` of N = `steps`, with W = `warmup`.

    It rises linearly, peak (k+1)/W, for k < W. A half cosine then falls from `peak` to `floor` at k = N.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
