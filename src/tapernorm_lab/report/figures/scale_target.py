"""The figure of a stage that varies the scale loss: each run's gap to Baseline by the scale that its loss holds to."""

from collections import Counter
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from tapernorm.util.errors import UserError

from ...config.study_runs import StageJob
from ..engine import statistics as stats
from ..frames.study_stages import DIVERGED
from . import style

_COLUMNS = ("arm", "label", "start_fraction", "end_fraction", "seed", "scale_target", "valid_ce", "gap_percent")
_APART = 1.012  # between arms, whose points at one target would hide each other


def target_figure(rows: pd.DataFrame, job: StageJob) -> tuple[Figure, pd.DataFrame]:
    """A point per run with a scale loss, of all arms together.

    Raises:
        UserError: no run of the stage has a scale loss and a Baseline of its seed.
    """
    frame = drawn(rows, job)
    arms = [arm.name for arm in job.stage.arms if arm.name in set(frame["arm"])]
    note = style.wrapped(_note(frame, job), style.PAGE_IN)
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=(style.PAGE_IN, 2.9 + 0.125 * len(note.splitlines())), layout="constrained")
        axes = figure.subplots()
        for place, arm in enumerate(arms):
            _draw(axes, pd.DataFrame(frame[frame["arm"] == arm]), place, len(arms))
        axes.axhline(0, color=style.LINES["baseline"]["color"], linewidth=0.7)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("scale target: RMS of what reaches the final norm, where the scale loss starts")
        axes.set_ylabel("gap to Baseline (%)")
        figure.legend(loc="outside right upper")
        figure.supxlabel(note, x=0.01, ha="left", color="#404040", linespacing=1.25)
    return figure, frame


def drawn(rows: pd.DataFrame, job: StageJob) -> pd.DataFrame:
    """Everything the figure draws: a row per run, its gap in percent of the loss of the same seed's Baseline.

    Raises:
        UserError: as `target_figure`.
    """
    runs: list[dict[str, Any]] = [run for run in rows.to_dict("records") if run["outcome"] != DIVERGED]
    baseline = {run["seed"]: run["valid_ce"] for run in runs if run["arm"] == job.stage.baseline}
    points = [
        run | {"gap_percent": stats.paired_gap({run["seed"]: run["valid_ce"]}, baseline).value}
        for run in runs
        if not pd.isna(run["scale_target"]) and run["seed"] in baseline
    ]
    if not points:
        raise UserError(
            f"stage {job.stage.name} has no run with a scale loss and a Baseline of its seed: leave its figure out"
        )
    return pd.DataFrame(points, columns=list(_COLUMNS))


def _draw(axes: Axes, here: pd.DataFrame, place: int, of: int) -> None:
    first = here.iloc[0]
    start, end = first["start_fraction"], first["end_fraction"]
    window = f"from {start:g}, no taper" if pd.isna(end) else f"taper from {start:g} to {end:g}"
    axes.plot(
        here["scale_target"] * _APART ** (place - (of - 1) / 2),
        here["gap_percent"],
        label=f"{first['label']},\n{window}",
        **style.POINTS[place % len(style.POINTS)],
    )


def _note(frame: pd.DataFrame, job: StageJob) -> str:
    counts = sorted(Counter(frame["arm"]).values())
    n = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]}–{counts[-1]}"
    return (
        f"Run {job.run}, stage {job.stage.name}, d {job.stage.d_model}. Each point: one run, {n} of each arm, against"
        " the Baseline of its seed; below 0 better. The target comes with the seed and the start: arms that start"
        f" together share it. {job.caption}"
    )
