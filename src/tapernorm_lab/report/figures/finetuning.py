"""The fine-tuning figure: losses and their gap to Vanilla per size, above the gate and FakeLN's removals."""

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from tapernorm.util.errors import UserError

from ...config.gpt2 import METHOD_LABELS, METHODS
from ..frames.gpt2 import MODEL
from . import bands, style

LOSS, HELD_OUT = "ce", "valid_ce"
GAPS = {LOSS: bands.GAP, HELD_OUT: "valid_ce_gap_percent"}
GATE, REMOVAL = "gate", "removal"
CURVES = ("run", *MODEL, "step", LOSS, HELD_OUT, GATE)  # the columns of the curves that the figure reads
TAPERS, FAKELN = ("internal_aux", "all_aux"), "fakeln"
STAGES = {"ln_2": "MLP", "qk": "q, k", "v": "v", "ln_f": "final"}  # last part of a site's name -> the stage it is of
_HEIGHTS = (1.15, 0.85, 0.3, 0.42)


def figure_finetune(
    curves: pd.DataFrame, removals: pd.DataFrame, *, run: str, caption: str
) -> tuple[Figure, pd.DataFrame]:
    """Draw every size in a column of its own: training loss, gap to Vanilla, gate, removals; held-out loss as circles.

    Raises:
        UserError: no curve, seeds logged at different steps, or runs of one size on different schedules.
    """
    frame = drawn(curves, removals)
    sizes = list(frame["size"].unique())
    panels = [LOSS, bands.GAP, GATE, REMOVAL]
    shown = [panel for panel in panels if len(bands.where(frame, metric=panel))]
    heights = [_HEIGHTS[panels.index(panel)] for panel in shown]
    width_in = style.COLUMN_IN if len(sizes) == 1 else style.PAGE_IN
    note = style.wrapped(_note(frame, run, caption), width_in)
    height_in = 0.75 + 1.4 * sum(heights) + 0.125 * len(note.splitlines())
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        axes = figure.subplots(
            len(shown), len(sizes), sharex="col", squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for column, size in enumerate(sizes):
            axes[0, column].set_title(f"GPT-2 {size}")
            axes[-1, column].set_xlabel("optimizer step")
            for row, panel in enumerate(shown):
                _draw(axes[row, column], bands.where(frame, size=size), panel, labelled=column == 0)
        methods = [method for method in METHODS if len(bands.where(frame, method=method))]
        figure.legend(
            handles=[Line2D([], [], label=METHOD_LABELS[m], **style.METHODS[m]) for m in methods] + _circle(frame),
            loc="outside upper center",
            ncols=2 if len(sizes) == 1 else len(methods) + 1,
        )
        figure.supxlabel(note, x=0.01, ha="left", color="#404040", linespacing=1.25)
    return figure, frame


def drawn(curves: pd.DataFrame, removals: pd.DataFrame) -> pd.DataFrame:
    """Everything the figure draws, as rows (size, metric, method, step, ...), a removal with its site and stage."""
    if curves.empty:
        raise UserError("figure_finetune needs curves of fine-tunes and there are none: run at least one of them")
    parts = []
    for size in curves["size"].unique():
        here = bands.where(curves, size=size)
        for metric, gap in GAPS.items():
            if metric in here and bands.has(here, metric):
                here = bands.with_gap(here, metric=metric, gap=gap, keys=bands.FINETUNING)
        for method in (m for m in METHODS if m in set(here["method"])):
            parts += [part.assign(size=size, method=method) for part in _lines(bands.where(here, method=method))]
        tapered = here[here["method"].isin(TAPERS)]
        if len(tapered):
            gate = bands.gate(pd.DataFrame(tapered), keys=bands.FINETUNING).rename(columns={"gate": "median"})
            parts.append(gate.assign(size=size, metric=GATE, method="taper"))
        parts.append(_removed(bands.where(removals, size=size)).assign(size=size, metric=REMOVAL, method=FAKELN))
    leading = ["size", "metric", "method", "step"]
    frame = pd.concat([part for part in parts if len(part)], ignore_index=True)
    return pd.DataFrame(frame, columns=[*leading, *(c for c in frame.columns if c not in leading)])


def _window(curves: pd.DataFrame, metric: str) -> int:
    """Points of the rolling mean: of the training loss about 6 %, a fine-tune is short and losses lie close together.

    Their gap is of the same batches and varies less: about 2 %, so that it rises where a norm goes. Held out: none.
    """
    points = len(set(curves.dropna(subset=[metric])["step"]))
    return {LOSS: 2 * (3 * points // 100) + 1, GAPS[LOSS]: bands.smoothing_window(points)}.get(metric, 1)


def _lines(curves: pd.DataFrame) -> list[pd.DataFrame]:
    """What is drawn of one method at one size: training loss smoothed, held-out loss as it is, and their gaps."""
    parts = []
    method = curves["method"].iloc[0]
    for metric, gap in GAPS.items():
        for name in (metric, gap):
            if name not in curves or not bands.has(curves, name) or (name == gap and method == "vanilla"):
                continue
            band = bands.across_seeds(curves, name, window=_window(curves, name), keys=bands.FINETUNING)
            parts.append(band.assign(metric=name))
    if method == FAKELN and bands.has(curves, GATE):
        band = bands.across_seeds(curves, GATE, window=1, keys=bands.FINETUNING)
        parts.append(band.assign(metric=GATE))
    return parts


def _removed(removals: pd.DataFrame) -> pd.DataFrame:
    """Step, site and stage of every removal at one size, which all of its seeds share."""
    distinct = removals.drop_duplicates(["site", "step"]).sort_values("step", ignore_index=True, kind="stable")
    found = pd.DataFrame(distinct, columns=["site", "step"])
    if twice := found["site"][found["site"].duplicated()].tolist():
        raise UserError(
            f"the FakeLN runs at size {removals['size'].iloc[0]} differ in when they removed {twice[0]}: one figure"
            " shows one schedule; run them with the same settings"
        )
    return found.assign(stage=[STAGES[site.rpartition(".")[2]] for site in found["site"]])


def _draw(axes: Axes, here: pd.DataFrame, panel: str, *, labelled: bool) -> None:
    draw = {LOSS: _draw_losses, bands.GAP: _draw_gaps, GATE: _draw_gate, REMOVAL: _draw_removals}
    draw[panel](axes, here, labelled)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_losses(axes: Axes, here: pd.DataFrame, labelled: bool) -> None:
    _draw_curves(axes, here, LOSS, HELD_OUT)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if labelled:
        axes.set_ylabel("loss (nats/token)")


def _draw_gaps(axes: Axes, here: pd.DataFrame, labelled: bool) -> None:
    axes.axhline(0, color=style.METHODS["vanilla"]["color"], linewidth=0.7)
    _draw_curves(axes, here, GAPS[LOSS], GAPS[HELD_OUT])
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if labelled:
        axes.set_ylabel("gap to\nVanilla (%)")


def _draw_curves(axes: Axes, here: pd.DataFrame, line: str, circles: str) -> None:
    """Training as a line with its band, held-out as circles in the same colour."""
    shown = here[here["metric"].isin((line, circles))]
    for method in (m for m in METHODS if m in set(shown["method"])):
        look = style.METHODS[method]
        trained, held_out = (bands.where(here, metric=metric, method=method) for metric in (line, circles))
        if bands.has(trained, "low"):
            span = (trained["step"], trained["low"], trained["high"])
            axes.fill_between(*span, color=look["color"], alpha=style.BAND_ALPHA, linewidth=0)
        axes.plot(trained["step"], trained["median"], **look)
        axes.plot(held_out["step"], held_out["median"], color=look["color"], **style.HELD_OUT)


def _draw_gate(axes: Axes, here: pd.DataFrame, labelled: bool) -> None:
    taper, fakeln = (bands.where(here, metric=GATE, method=method) for method in ("taper", FAKELN))
    axes.fill_between(taper["step"], taper["median"], color=style.GATE["color"], alpha=0.15, linewidth=0)
    axes.plot(taper["step"], taper["median"], **style.GATE)
    stairs = {"color": style.METHODS[FAKELN]["color"], "linewidth": style.GATE["linewidth"]}
    axes.plot(fakeln["step"], fakeln["median"], drawstyle="steps-post", **stairs)
    axes.set(ylim=(0, 1.08), yticks=(0, 1))
    if labelled:
        axes.set_ylabel("gate")


def _draw_removals(axes: Axes, here: pd.DataFrame, labelled: bool) -> None:
    """A tick per removed norm, a row per stage, in the order of the stages downward."""
    found, stages = bands.where(here, metric=REMOVAL), list(STAGES.values())
    rows = [bands.where(found, stage=stage)["step"].tolist() for stage in stages]
    color = style.METHODS[FAKELN]["color"]
    axes.eventplot(rows, lineoffsets=range(len(stages)), linelengths=0.62, linewidths=0.9, colors=color)
    axes.set(ylim=(len(stages) - 0.4, -0.6))
    axes.set_yticks(range(len(stages)), stages if labelled else [""] * len(stages))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    if labelled:
        axes.set_ylabel("FakeLN\nremoves")


def _circle(frame: pd.DataFrame) -> list[Line2D]:
    """The legend's entry for held-out losses, where there are any."""
    if not len(bands.where(frame, metric=HELD_OUT)):
        return []
    return [Line2D([], [], color=style.GATE["color"], label="held out", **style.HELD_OUT)]


def _note(frame: pd.DataFrame, run: str, caption: str) -> str:
    """What the reader must know: run, seeds, lines and circles, smoothing, the strips, the run's own caption."""
    lines, gaps = (bands.where(frame, metric=metric) for metric in (LOSS, GAPS[LOSS]))
    window = f"{_span(lines, 'window')} logged steps"
    window += f" (the gap: {_span(gaps, 'window')})" if len(gaps) else ""
    several = max(set(lines["n"])) > 1
    parts = [
        f"Run {run}, {_span(lines, 'n')} seed{'s' if several else ''}.",
        f"Lines: training loss, all methods on the same batches, each seed smoothed by a centred mean of {window}",
    ]
    parts[-1] += ", median; band: 2.5–97.5 percentile." if several else "."
    if len(bands.where(frame, metric=HELD_OUT)):
        parts.append("Circles: held-out loss, not smoothed.")
    strips = {"taper": "grey, of the tapers", FAKELN: "green, the share of norms that FakeLN still computes"}
    gates = set(bands.where(frame, metric=GATE)["method"])
    if told := [text for method, text in strips.items() if method in gates]:
        parts.append(f"Gate: {'; '.join(told)}.")
    return " ".join([*parts, caption])


def _span(rows: pd.DataFrame, column: str) -> str:
    values = sorted(int(value) for value in set(rows[column]))
    return f"{values[0]}" if len(values) == 1 else f"{values[0]}–{values[-1]}"
