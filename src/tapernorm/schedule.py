"""Gate and learning rate as pure functions of the optimizer step: equation (3) of `taper`."""

import math
import operator
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class GateSchedule:
    """When the gate falls: g = 1 before `start`, a half cosine from there, g = 0 from `end` on.

    Raises:
        ValueError: unless start and end are whole numbers and 1 <= start < end (the calibration needs at least one step
            at g = 1).
    """

    start: int  # k_start: the first step in the mixing form
    end: int  # k_end: the first step at g = 0

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if (known := whole_number(value := getattr(self, name))) is None:
                raise ValueError(f"gate schedule counts optimizer steps, whole numbers, got {name} {value!r}")
            object.__setattr__(self, name, known)
        if not 1 <= self.start < self.end:
            raise ValueError(
                f"gate schedule needs 1 <= start < end, got start {self.start} and end {self.end}: "
                "take more steps, a later start_fraction or a later end_fraction"
            )

    @classmethod
    def from_fractions(cls, steps: int, start_fraction: float, end_fraction: float) -> Self:
        """k_start = round(start_fraction N), k_end = round(end_fraction N).

        Raises:
            ValueError: a fraction is not finite, or as the class says.
        """
        if not math.isfinite(start_fraction + end_fraction):
            raise ValueError(f"gate schedule needs finite fractions, got {start_fraction} and {end_fraction}")
        return cls(round(start_fraction * steps), round(end_fraction * steps))


def whole_number(value: Any) -> int | None:
    """`value` as an int where it is of an integer type, of any library; None where it is not."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def gate_at(step: int, schedule: GateSchedule) -> float:
    """g(k) = 1/2 (1 + cos(pi (k - k_start)/(k_end - k_start))) inside the window, 1 before it, 0 after it."""
    if step < schedule.start:
        return 1.0
    if step >= schedule.end:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * (step - schedule.start) / (schedule.end - schedule.start)))


def lr_at(step: int, *, steps: int, peak: float, warmup: int, floor: float = 0.0) -> float:
    """Linear warm-up peak (k+1)/W for k < W, then half a cosine that reaches `floor` at k = N."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
