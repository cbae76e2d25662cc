"""Parts of panels: curves with their bands, the gate, and tick labels."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from ..engine.statistics import BAND
from . import style
from .bands import has, span, where

_DECADES = 300  # ratio of an axis' ends above which only powers of ten are labelled


def curves(
    axes: Axes,
    rows: pd.DataFrame,
    by: str,
    looks: Mapping[str, dict[str, Any]],
    labels: Mapping[str, str],
    markers: Mapping[str, str] | None = None,
    marked: int = 6,
) -> None:
    """Draw a median over seeds with its band for each value of the column `by`; two seeds as two lines.

    Args:
        rows: step, n, median, low and high, ordered by step.
        markers: markers that distinguish the curves in grey, about `marked` on each curve.
    """
    present = [name for name in looks if name in set(rows[by])]
    for place, name in enumerate(present):
        line, look = where(rows, **{by: name}), dict(looks[name])
        if markers:
            every = max(1, len(line) // max(1, marked))
            at = (every * place // len(present), every) if marked else []
            look |= {"marker": markers[name], "markersize": 3, "markevery": at}
        shown: list[Any] = [line["median"]]
        if set(line["n"]) == {2}:
            shown = _two_seeds(line)
        elif has(line, "low"):
            band = {"color": look["color"], "alpha": style.BAND_ALPHA, "linewidth": 0}
            axes.fill_between(line["step"], line["low"], line["high"], **band)
        for number, values in enumerate(shown):
            axes.plot(line["step"], values, label="" if number else labels[name], **look)


def _two_seeds(line: pd.DataFrame) -> list[Any]:
    """Return the smaller and the larger of two seeds, extrapolated from the percentiles `low` and `high`."""
    beyond = (line["high"] - line["low"]) * BAND[0] / (BAND[1] - BAND[0])
    return [line["low"] - beyond, line["high"] + beyond]


def reading(rows: pd.DataFrame) -> str:
    """Return the sentences of a caption on lines, bands and smoothing of curves."""
    counts, windows = (sorted(set(rows[column].dropna())) for column in ("n", "window"))
    several = "Line: median over seeds; band: 2.5–97.5 percentile." if counts[-1] > 2 else ""
    two = "Two seeds have two lines: the smaller and the larger at each step." if 2 in counts else ""
    one = "One seed has no band." if counts == [1] else ""
    smoothed = f"Each seed is smoothed by a centred mean of {span(rows, 'window')} logged steps."
    return " ".join(filter(None, [several, two, one, smoothed if windows[-1] > 1 else ""]))


def gate(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the gate over the steps, from 1 (norm) to 0 (constant)."""
    axes.fill_between(rows["step"], rows["median"], color=style.GATE["color"], alpha=0.15, linewidth=0)
    axes.plot(rows["step"], rows["median"], **style.GATE)
    axes.set(ylim=(0, 1.08), yticks=(0, 1))
    steps(axes)


def steps(axes: Axes) -> None:
    """Label the steps on the horizontal axis, in thousands if there are many."""
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def log_ticks(axis: Axis) -> None:
    """Label a logarithmic axis at 1, 2, 5; a short one also at 3, and a long one only at powers of ten."""
    low, high = axis.get_view_interval()
    subs = (1, 2, 3, 5) if high / low <= 30 else (1, 2, 5) if high / low <= _DECADES else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def zero(axes: Axes) -> None:
    """Draw the line of a gap of 0."""
    axes.axhline(0, color=style.LINES["baseline"]["color"], linewidth=0.7)
