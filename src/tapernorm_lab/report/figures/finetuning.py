"""The fine-tuning figure: losses and their gap to Vanilla per size, above the gate and FakeLN's removals."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tapernorm.util.errors import UserError

from ...config.gpt2 import METHOD_LABELS, METHODS
from ...config.jobs import ReportJob
from ..frames.gpt2 import MODEL
from . import bands, panels, style
from .figure import FigureSpec, Layout, Row

LOSS, HELD_OUT = "ce", "valid_ce"
GAPS = {LOSS: bands.GAP, HELD_OUT: "valid_ce_gap_percent"}
GATE, REMOVAL = bands.GATE, "removal"
CURVES = ("run", *MODEL, "step", LOSS, HELD_OUT, GATE)  # columns of the curves that the figure reads
TAPERS, FAKELN = ("internal_aux", "all_aux"), "fakeln"
STAGES = {"ln_2": "MLP", "qk": "q, k", "v": "v", "ln_f": "final"}  # last part of a norm's name -> stage of its removal


def drawn(found: Any, _: ReportJob) -> pd.DataFrame:
    """Return the data of the figure: rows (size, metric, method, step, ...), and removals with site and stage.

    Raises:
        UserError: there is no curve, seeds logged at different steps, or the schedules of one size differ.
    """
    curves, removals = found.curves, found.removals
    if curves.empty:
        raise UserError("figure_finetune needs the curve of a fine-tune, and there is none: run `tapernorm finetune`")
    parts = []
    for size in curves["size"].unique():
        here = bands.where(curves, size=size)
        for metric, gap in GAPS.items():
            if metric in here and bands.has(here, metric):
                here = bands.with_gap(here, metric=metric, gap=gap, keys=bands.FINETUNING)
        for method in (m for m in METHODS if m in set(here["method"])):
            parts += [part.assign(size=size, method=method) for part in _lines(bands.where(here, method=method))]
        tapered = bands.where(here, method=TAPERS)
        if len(tapered):
            parts.append(bands.gate(tapered, keys=bands.FINETUNING).assign(size=size, method="taper"))
        parts.append(_removed(bands.where(removals, size=size)).assign(size=size, metric=REMOVAL, method=FAKELN))
    return bands.joined(parts, bands.FINETUNING)


def _lines(curves: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield the lines of one method at one size: smoothed training loss, held-out loss, and their gaps."""
    method = curves["method"].iloc[0]
    names = [name for pair in GAPS.items() for name in pair] + ([GATE] if method == FAKELN else [])
    for name in names:
        if name in curves and bands.has(curves, name) and not (name in GAPS.values() and method == "vanilla"):
            window = _window(curves, name)
            yield bands.across_seeds(curves, name, window=window, keys=bands.FINETUNING).assign(metric=name)


def _window(curves: pd.DataFrame, metric: str) -> int:
    """Return the points of the rolling mean.

    Training loss: about 6 % of the points, because a fine-tune is short and its losses lie close together. Gap: about
    2 %, because it varies less and must show each removal. Held-out loss: not smoothed.
    """
    points = len(set(curves.dropna(subset=[metric])["step"]))
    return {LOSS: 2 * (3 * points // 100) + 1, GAPS[LOSS]: bands.smoothing_window(points)}.get(metric, 1)


def _removed(removals: pd.DataFrame) -> pd.DataFrame:
    """Return step, site and stage of every removal at one size; all seeds share them."""
    distinct = removals.drop_duplicates(["site", "step"]).sort_values("step", ignore_index=True, kind="stable")
    found = pd.DataFrame(distinct, columns=["site", "step"])
    if twice := found["site"][found["site"].duplicated()].tolist():
        raise UserError(
            f"the FakeLN runs at size {removals['size'].iloc[0]} differ in when they removed {twice[0]}: one figure"
            " shows one schedule; run them with the same settings"
        )
    return found.assign(stage=[STAGES[site.rpartition(".")[2]] for site in found["site"]])


def _layout(frame: pd.DataFrame, *_: Any) -> Layout:
    """Lay out a column per size, without rows of panels that have no data."""
    sizes = list(frame["size"].unique())

    def row(draw: Any, metrics: Sequence[str], height_in: float, ylabel: str, **more: Any) -> Row:
        return Row(draw, [{"size": size, "metric": metrics} for size in sizes], height_in, ylabel, **more)

    titles = [f"GPT-2 {size}" for size in sizes]
    rows = [
        row(_losses, (LOSS, HELD_OUT), 1.7, "loss (nats/token)", titles=titles, same_y=False),
        row(_gaps, tuple(GAPS.values()), 1.3, "gap to\nVanilla (%)", same_y=False),
        row(_gates, (GATE,), 0.5, "gate"),
        row(_removals, (REMOVAL,), 0.75, "FakeLN\nremoves"),
    ]
    shown = [row for row in rows if len(bands.where(frame, metric=row.panels[0]["metric"]))]
    shown[-1] = replace(shown[-1], xlabel="optimizer step")
    single = len(sizes) == 1
    return Layout(shown, style.COLUMN_IN if single else style.PAGE_IN, legend_columns=2 if single else len(METHODS) + 1)


def _losses(axes: Axes, rows: pd.DataFrame) -> None:
    _curves(axes, rows, LOSS, HELD_OUT)
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _gaps(axes: Axes, rows: pd.DataFrame) -> None:
    panels.zero(axes)
    _curves(axes, rows, *GAPS.values())
    axes.yaxis.set_major_locator(MaxNLocator(4))


def _curves(axes: Axes, rows: pd.DataFrame, line: str, points_of: str) -> None:
    """Draw the training loss as a line with its band, and the held-out loss as points of the same colour."""
    held_out = bands.where(rows, metric=points_of)
    markers = style.MARKERS if len(held_out) else {}
    panels.curves(axes, bands.where(rows, metric=line), "method", style.METHODS, METHOD_LABELS, markers, marked=0)
    for method, points in held_out.groupby("method", sort=False):
        look = {"color": style.METHODS[str(method)]["color"], "marker": markers[str(method)]}
        axes.plot(points["step"], points["median"], **style.HELD_OUT, **look)
    panels.steps(axes)


def _gates(axes: Axes, rows: pd.DataFrame) -> None:
    panels.gate(axes, bands.where(rows, method="taper"))
    share = bands.where(rows, method=FAKELN)
    stairs = {"color": style.METHODS[FAKELN]["color"], "linewidth": style.GATE["linewidth"]}
    axes.plot(share["step"], share["median"], drawstyle="steps-post", **stairs)


def _removals(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw a tick per removed norm, in a row per stage, from top to bottom in the order of the stages."""
    stages = list(STAGES.values())
    steps = [bands.where(rows, stage=stage)["step"].tolist() for stage in stages]
    color = style.METHODS[FAKELN]["color"]
    axes.eventplot(steps, lineoffsets=range(len(stages)), linelengths=0.62, linewidths=0.9, colors=color)
    axes.set_ylim(len(stages) - 0.4, -0.6)
    axes.set_yticks(range(len(stages)), stages)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    panels.steps(axes)


def _caption(frame: pd.DataFrame, _: Any, job: ReportJob) -> Iterator[str]:
    lines, gaps = (bands.where(frame, metric=metric) for metric in (LOSS, GAPS[LOSS]))
    yield "Fine-tunes of GPT-2 by four methods, all on the same batches."
    yield f"Run {job.run}, {bands.seeds(lines)}. Lines: training loss. {panels.reading(lines)}"
    if len(gaps) and max(gaps["window"]) > 1:
        yield f"The gap is smoothed by a mean of {bands.span(gaps, 'window')}."
    if len(bands.where(frame, metric=HELD_OUT)):
        yield "Points: held-out loss, not smoothed."
    strips = {"taper": "Grey: the gate of the tapers.", FAKELN: "Green: the share of norms that FakeLN still computes."}
    gates = set(bands.where(frame, metric=GATE)["method"])
    yield from (text for method, text in strips.items() if method in gates)
    yield job.caption


FIGURE_FINETUNE = FigureSpec(drawn, _layout, _caption)
