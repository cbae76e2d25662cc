"""A measured figure, its bound, and its line in the printed table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tapernorm_lab.experiments.speed.interleaved_timing import Interval, bootstrap_median


@dataclass(frozen=True)
class Figure:
    """A median with its 95 % interval over n samples, its bound, if any, and the raw samples."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    bound: str | None
    passes: bool | None
    n: int
    samples: tuple[float, ...] = ()  # in the order of the rounds; empty for a ratio, whose arms have their own figures
    note: str | None = None  # why it has no bound here, where it has one elsewhere

    def row(self) -> dict[str, object]:
        """Return the figure as JSON values, without samples, and without a note if there is none."""
        left_out = ("samples",) if self.note else ("samples", "note")
        return {key: value for key, value in asdict(self).items() if key not in left_out}


def figure(
    name: str,
    measured: Interval | Sequence[float] | float,
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str | None = None,
) -> Figure:
    """Return a figure from an interval, from raw samples (by their median) or from one number."""
    if isinstance(measured, int | float):
        measured = [measured]
    samples = () if isinstance(measured, Interval) else tuple(measured)
    if not isinstance(measured, Interval):
        measured = bootstrap_median(measured)
    value, bound, passes = measured.value, None, None
    if at_least is not None:
        bound, passes = f">= {at_least:g}", value >= at_least
    if at_most is not None:
        bound, passes = f"<= {at_most:g}", value <= at_most
    return Figure(name, value, unit, measured.low, measured.high, bound, passes, measured.n, samples, note)


def line(f: Figure) -> str:
    """Return the figure's line of the printed table."""
    interval = f"[{short(f.low)}, {short(f.high)}]" if f.n > 1 else ""
    verdict = {True: "ok", False: "MISSED", None: ""}[f.passes]
    told = f"{f.bound or '':<10} {verdict}" if f.note is None else f.note
    return f"{f.name:<58} {short(f.value):>9} {f.unit:<6} {interval:<18} n={f.n:<4} {told}"


def short(value: float) -> str:
    """Format `value` in three significant digits, or from a thousand on as a whole number."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
