"""One measured figure, its bound, and the file and table that hold them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tapernorm.bench import Interval, bootstrap_median


@dataclass(frozen=True)
class Figure:
    """A median with its 95 % interval over n samples, and the bound it is held to, if any."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    bound: str | None
    passes: bool | None
    n: int

    def row(self) -> dict[str, object]:
        return asdict(self)


def figure(
    name: str,
    measured: Interval | Sequence[float] | float,
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Figure:
    """A figure from an interval, from raw samples (their median) or from one number."""
    if isinstance(measured, int | float):
        measured = Interval(measured, measured, measured, 1)
    elif not isinstance(measured, Interval):
        measured = bootstrap_median(measured)
    value, bound, passes = measured.value, None, None
    if at_least is not None:
        bound, passes = f">= {at_least:g}", value >= at_least
    if at_most is not None:
        bound, passes = f"<= {at_most:g}", value <= at_most
    return Figure(name, value, unit, measured.low, measured.high, bound, passes, measured.n)


def line(f: Figure) -> str:
    """One line of the printed table."""
    interval = f"[{f.low:.3g}, {f.high:.3g}]" if f.n > 1 else ""
    verdict = {True: "ok", False: "MISSED", None: ""}[f.passes]
    return f"{f.name:<48} {f.value:>9.3g} {f.unit:<6} {interval:<18} n={f.n:<4} {f.bound or '':<10} {verdict}"
