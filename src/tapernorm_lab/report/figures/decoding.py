"""The decoding figure: speed relative to Baseline per mode and batch, with intervals, and the published ranges."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tapernorm.util.errors import UserError

from ...config import published
from ...config.jobs import ReportJob
from ..engine import statistics as stats
from ..frames.decoding import MODES, Bench, arm_labels
from ..tables.table2_notes import setting, unavailable_notes
from . import bands, style
from .figure import FigureSpec, Layout, Row

_AGAINST = {"baseline_naive": "several-op norm", "baseline": "F.rms_norm"}
_ARMS = {"baseline_naive": ("unfused", "fused"), "baseline": ("baseline_naive", "unfused", "fused", "identity")}
_STEP = 0.19  # distance of arms, in units of the distance of prompts


def drawn(bench: Bench, _: ReportJob) -> pd.DataFrame:
    """Return the data of the figure: a row per panel (against, mode, batch), prompt and arm.

    Raises:
        UserError: nothing was decoded.
    """
    rows = bench.where(phase="decode")
    if not rows:
        raise UserError(
            "figure_decode needs decoding in some mode, which was not measured: run `tapernorm bench decode`"
        )
    parts = []
    for against, arms in _ARMS.items():
        for row in rows:
            if row["arm"] in arms and (against == "baseline" or row["mode"] == "eager"):
                theirs = published.TABLE2_RATIO.get(row["arm"]) if against == "baseline_naive" else None
                ratio = f"ratio_{against}"
                parts.append(
                    {"against": against, **{key: row[key] for key in ("mode", "batch", "prompt", "arm", "n")}}
                    | {"ratio": row[ratio], "low": row[f"{ratio}_low"], "high": row[f"{ratio}_high"]}
                    | {"published_low": theirs.low if theirs else stats.NAN}
                    | {"published_high": theirs.high if theirs else stats.NAN}
                )
    return pd.DataFrame(parts)


def _layout(frame: pd.DataFrame, bench: Bench, _: ReportJob) -> Layout:
    """Lay out a row per batch: eager mode against the several-op norm, then every mode against `F.rms_norm`."""
    columns = pd.DataFrame(frame, columns=["against", "mode"]).drop_duplicates().to_dict("records")
    draw = partial(_draw, labels=arm_labels(bench))
    rows = [
        Row(draw, [{**column, "batch": batch} for column in columns], 1.4, f"batch {batch}\nspeed / Baseline")
        for batch in sorted(frame["batch"].unique())
    ]
    rows[0] = replace(rows[0], titles=[f"{MODES[c['mode']]}, against\n{_AGAINST[c['against']]}" for c in columns])
    rows[-1] = replace(rows[-1], xlabel="prompt (tokens)")
    few = len(columns) < 3
    return Layout(rows, style.COLUMN_IN if few else style.PAGE_IN, legend_columns=2 if few else 3, same_y=True)


def _draw(axes: Axes, cell: pd.DataFrame, *, labels: dict[str, str]) -> None:
    """Draw the arms side by side at each prompt, and a line at Baseline."""
    prompts, arms = sorted(cell["prompt"].unique()), _ARMS[cell["against"].iloc[0]]
    axes.axhline(1, color="#000000", linewidth=0.7)
    for index, arm in enumerate(arms):
        mine, look = bands.where(cell, arm=arm), style.ARMS[arm]
        shift = _STEP * (index - (len(arms) - 1) / 2)
        at = [prompts.index(prompt) + shift for prompt in mine["prompt"]]
        error = [mine["ratio"] - mine["low"], mine["high"] - mine["ratio"]] if bands.has(mine, "low") else None
        axes.errorbar(at, mine["ratio"], yerr=error, linestyle="none", elinewidth=0.9, label=labels[arm], **look)
        for low, high in mine[["published_low", "published_high"]].dropna().drop_duplicates().to_numpy().tolist():
            name = f"{published.TABLE2_SHORT}, {arm}"
            axes.axhspan(low, high, label=name, linewidth=0, alpha=style.BAND_ALPHA, **style.RANGES[arm])
    axes.set_xticks(range(len(prompts)), [str(prompt) for prompt in prompts])
    axes.set_xlim(-0.5, len(prompts) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    axes.yaxis.set_major_formatter("{x:.2f}")


def _caption(frame: pd.DataFrame, bench: Bench, job: ReportJob) -> Iterator[str]:
    yield "Decoding speed relative to Baseline."
    yield f"Run {job.run}. {setting(bench, bench.where(phase='decode'))}"
    several = max(frame["n"]) > 1
    yield "Points: median of the ratio paired by round." + (" Bars: its 95 % bootstrap interval." if several else "")
    theirs = f"ranges published by {published.TABLE2_SHORT} on {published.TABLE2_SETTING}"
    if bands.has(frame, "published_low"):
        yield f"Bands: the {theirs}, drawn for the same mode and the same Baseline."
    else:
        yield f"The {theirs} are of eager mode, and are not drawn."
    yield from unavailable_notes(bench)
    yield job.caption


FIGURE_DECODE = FigureSpec(drawn, _layout, _caption)
