"""The figures of a stage of the study: gaps to Baseline by the taper's end, or by the target of the scale loss."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from tapernorm.util.errors import UserError

from ...config.study_runs import StageJob
from ...config.variants import VARIANT_LABELS, VARIANTS
from ..engine import statistics as stats
from ..frames.study_stages import DIVERGED
from ..tables.study_stages import stage_records
from . import bands, panels, style
from .figure import Drawing, FigureSpec, Layout, Row

_WINDOW_COLUMNS = (
    *("variant", "start_fraction", "end_fraction", "arm", "seeds", "gap_pairs"),
    *("gap_percent", "gap_low", "gap_high"),
)
_TARGET_COLUMNS = ("arm", "label", "start_fraction", "end_fraction", "seed", "scale_target", "valid_ce", "gap_percent")
_APART = 0.008  # distance of lines, as a fraction of the steps, so that their intervals do not overlap
_APART_TIMES = 1.012  # ratio of the targets at which two arms are drawn, so that points do not overlap
_GAP = "gap to Baseline (%)"


def windows(rows: pd.DataFrame, job: StageJob) -> pd.DataFrame:
    """Return the data of a stage that varies the taper's window: a row per variant, start and end of the taper.

    Raises:
        UserError: no arm of the stage tapers as the paper does.
    """
    frame = pd.DataFrame(stage_records(rows, job))
    plain = frame["start_fraction"].notna() & frame["treatment"].isna() & frame["variant"].isin(VARIANTS)
    tapered = pd.DataFrame(frame[plain & (frame["gap_pairs"] > 0)])
    if tapered.empty:
        raise UserError(f"stage {job.stage.name} has no tapered arm with a gap to draw: leave its figure out")
    ordered = tapered.sort_values(["variant", "start_fraction", "end_fraction"], ignore_index=True)
    return pd.DataFrame(ordered, columns=list(_WINDOW_COLUMNS))


def targets(rows: pd.DataFrame, job: StageJob) -> pd.DataFrame:
    """Return the data of a stage that varies the scale loss: a row per run with that loss.

    Each gap is in percent of the loss of the same seed's Baseline.

    Raises:
        UserError: no run of the stage has a scale loss and a Baseline of its seed.
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
    return pd.DataFrame(points, columns=list(_TARGET_COLUMNS))


def _window_layout(frame: pd.DataFrame, *_: Any) -> Layout:
    """Lay out a panel per variant, with a line per start of the taper."""
    starts = sorted(set(frame["start_fraction"]))
    variants = [variant for variant in VARIANTS if variant in set(frame["variant"])]
    row = Row(
        partial(_draw_windows, starts=starts),
        [{"variant": variant} for variant in variants],
        2.5,
        _GAP,
        "taper ends at (fraction of the steps)",
        titles=[VARIANT_LABELS[variant] for variant in variants],
    )
    return Layout([row], style.COLUMN_IN if len(variants) == 1 else style.PAGE_IN, len(starts))


def _draw_windows(axes: Axes, here: pd.DataFrame, *, starts: list[float]) -> None:
    panels.zero(axes)
    for place, start in enumerate(starts):
        line = bands.where(here, start_fraction=start)
        axes.errorbar(
            line["end_fraction"] + _APART * (place - (len(starts) - 1) / 2),
            line["gap_percent"],
            yerr=line["gap_high"] - line["gap_percent"],  # the interval is symmetric
            label=f"from {start:g}",
            **style.STARTS[place % len(style.STARTS)],
        )
    axes.set_xticks(sorted(set(here["end_fraction"])))
    axes.xaxis.set_major_formatter("{x:g}")


def _target_layout(frame: pd.DataFrame, _: pd.DataFrame, job: StageJob) -> Layout:
    arms = [arm.name for arm in job.stage.arms if arm.name in set(frame["arm"])]
    xlabel = "scale target: running mean of the final norm's input RMS before the scale loss starts"
    return Layout([Row(partial(_draw_targets, arms=arms), [{}], 2.8, _GAP, xlabel)], legend_columns=3)


def _draw_targets(axes: Axes, frame: pd.DataFrame, *, arms: list[str]) -> None:
    """Draw a point per run, with a small distance between arms."""
    for place, arm in enumerate(arms):
        here = bands.where(frame, arm=arm)
        first = here.iloc[0]
        start, end = first["start_fraction"], first["end_fraction"]
        window = f"from {start:g}, no taper" if pd.isna(end) else f"taper from {start:g} to {end:g}"
        axes.plot(
            here["scale_target"] * _APART_TIMES ** (place - (len(arms) - 1) / 2),
            here["gap_percent"],
            label=f"{first['label']},\n{window}",
            **style.POINTS[place % len(style.POINTS)],
        )
    panels.zero(axes)
    axes.set_xscale("log")
    panels.log_ticks(axes.xaxis)


def _window_caption(frame: pd.DataFrame, _: pd.DataFrame, job: StageJob) -> Iterator[str]:
    several = " with its 95 % t interval" if min(frame["gap_pairs"]) > 1 else ""
    points = f"Points: mean over paired seeds{several}; below 0 is better."
    return _told(job, bands.seeds(frame, "gap_pairs"), points)


def _target_caption(frame: pd.DataFrame, _: pd.DataFrame, job: StageJob) -> Iterator[str]:
    counts = bands.span(frame.groupby("arm").size().to_frame("n"), "n")
    points = "Each point is a run against the Baseline of its seed; below 0 is better."
    shared = "The target comes with the seed and the start: arms that start together share it."
    return _told(job, f"{counts} runs of each arm", points, shared)


def _told(job: StageJob, counted: str, *reading: str) -> Iterator[str]:
    yield f"Stage {job.stage.name}: {job.stage.title}."
    yield f"Run {job.run}, d {job.stage.d_model}, {counted}."
    yield from reading
    yield job.caption


KINDS = {  # the setting `figure` of a stage -> its figure
    "window": FigureSpec(windows, _window_layout, _window_caption),
    "scale_target": FigureSpec(targets, _target_layout, _target_caption),
}


def draw_stage(rows: pd.DataFrame, job: StageJob) -> Drawing:
    """The figure of a stage, of the kind that its setting `figure` names.

    Raises:
        UserError: the setting names none, or the rows hold nothing to draw.
    """
    if job.stage.figure is None:
        raise UserError(f"stage {job.stage.name} has no figure: its setting `figure` is null")
    return KINDS[job.stage.figure].draw(rows, job)
