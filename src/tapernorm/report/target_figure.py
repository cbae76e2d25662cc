"""The figure of a stage that varies the scale loss: each run's gap to Baseline by the scale that its loss holds to."""

from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ..errors import UserError
from ..study_cells import StageJob
from . import style
from .study_rows import DIVERGED

_COLUMNS = ("arm", "label", "start_fraction", "end_fraction", "seed", "scale_target", "valid_ce", "gap_percent")


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
            _draw(axes, pd.DataFrame(frame[frame["arm"] == arm]), place)
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
        run | {"gap_percent": 100 * (run["valid_ce"] - baseline[run["seed"]]) / baseline[run["seed"]]}
        for run in runs
        if not pd.isna(run["scale_target"]) and run["seed"] in baseline
    ]
    if not points:
        raise UserError(
            f"stage {job.stage.name} has no run with a scale loss and a Baseline of its seed: leave its figure out"
        )
    return pd.DataFrame(points, columns=list(_COLUMNS))


def _draw(axes: Axes, here: pd.DataFrame, place: int) -> None:
    first = here.iloc[0]
    window = f"from {first['start_fraction']:g} to {first['end_fraction']:g}"
    axes.plot(
        here["scale_target"],
        here["gap_percent"],
        label=f"{first['label']},\n{window}",
        **style.POINTS[place % len(style.POINTS)],
    )


def _note(frame: pd.DataFrame, job: StageJob) -> str:
    seeds = sorted({int(seed) for seed in frame["seed"]})
    return (
        f"Run {job.run}, stage {job.stage.name}, d {job.stage.d_model}. Each point: one run, n = {len(seeds)}"
        f" seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))}) of each arm, against the Baseline of its"
        f" seed; below 0 better. Of an arm whose norms all stay, the first number is where its scale loss starts."
        f" {job.caption}"
    )
