"""The figure of a stage that varies when to taper: the gap to Baseline by the taper's end, a line per start."""

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tapernorm.util.errors import UserError

from ...config.study_runs import StageJob
from ...config.variants import VARIANT_LABELS, VARIANTS
from ..tables.study_stages import stage_records
from . import bands, style

_COLUMNS = (
    *("variant", "start_fraction", "end_fraction", "arm", "seeds", "gap_pairs"),
    *("gap_percent", "gap_low", "gap_high"),
)
_APART = 0.008  # of the steps, between lines that meet: their intervals would hide each other


def stage_figure(rows: pd.DataFrame, job: StageJob) -> tuple[Figure, pd.DataFrame]:
    """Gaps and their intervals, one panel per variant.

    Raises:
        UserError: no arm of the stage tapers as a variant of the paper does.
    """
    frame = drawn(rows, job)
    variants = [variant for variant in VARIANTS if variant in set(frame["variant"])]
    width_in = style.COLUMN_IN if len(variants) == 1 else style.PAGE_IN
    note = style.wrapped(_note(frame, job), width_in)
    with matplotlib.rc_context(style.RC):
        height_in = 2.6 + 0.125 * len(note.splitlines())
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        axes = figure.subplots(1, len(variants), sharey=True, squeeze=False)[0]
        for panel, variant in zip(axes, variants, strict=True):
            panel.set_title(VARIANT_LABELS[variant])
            _draw(panel, bands.where(frame, variant=variant), starts=sorted(set(frame["start_fraction"])))
            panel.set_xlabel("taper ends at (fraction of the steps)")
        axes[0].set_ylabel("gap to Baseline (%)")
        lines = {label: line for panel in axes for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
        figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=len(lines))
        figure.supxlabel(note, x=0.01, ha="left", color="#404040", linespacing=1.25)
    return figure, frame


def drawn(rows: pd.DataFrame, job: StageJob) -> pd.DataFrame:
    """Everything the figure draws: a row per variant, start and end of the taper.

    Raises:
        UserError: as `stage_figure`.
    """
    frame = pd.DataFrame(stage_records(rows, job))
    plain = frame["start_fraction"].notna() & frame["treatment"].isna() & frame["variant"].isin(VARIANTS)
    tapered = pd.DataFrame(frame[plain & (frame["gap_pairs"] > 0)])
    if tapered.empty:
        raise UserError(f"stage {job.stage.name} has no tapered arm with a gap to draw: leave its figure out")
    ordered = tapered.sort_values(["variant", "start_fraction", "end_fraction"], ignore_index=True)
    return pd.DataFrame(ordered, columns=list(_COLUMNS))


def _draw(axes: Axes, here: pd.DataFrame, starts: list[float]) -> None:
    axes.axhline(0, color=style.LINES["baseline"]["color"], linewidth=0.7)
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


def _note(frame: pd.DataFrame, job: StageJob) -> str:
    pairs = sorted({int(n) for n in frame["gap_pairs"]})
    n = f"{pairs[0]}" if len(pairs) == 1 else f"{pairs[0]}–{pairs[-1]}"
    bars = "mean over paired seeds with its 95 % t interval" if pairs[0] > 1 else "mean over paired seeds"
    return (
        f"Run {job.run}, stage {job.stage.name}, d {job.stage.d_model}, {n} seed{'s' if pairs[-1] > 1 else ''}. Each"
        f" line: when the taper starts; points: {bars}, below 0 better than Baseline. {job.caption}"
    )
