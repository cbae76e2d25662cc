"""The decoding figure: speed relative to Baseline per mode and batch, with intervals, and the published ranges."""

from collections.abc import Sequence

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tapernorm.util.errors import UserError

from ...config import published
from ..engine import statistics as stats
from ..frames.decoding import (
    MODES,
    Bench,
    Row,
    arm_labels,
)
from ..tables.table2_notes import setting, unavailable_notes
from . import bands, style

_AGAINST = {"baseline_naive": "several-op norm", "baseline": "F.rms_norm"}
_ARMS = {"baseline_naive": ("unfused", "fused"), "baseline": ("baseline_naive", "unfused", "fused", "identity")}
_STEP = 0.19  # between arms side by side; prompts are 1 apart


def figure_decode(bench: Bench, *, run: str, caption: str) -> tuple[Figure, pd.DataFrame]:
    """Draw decoding speed: first as published, eager against the several-op norm, then every mode against `F.rms_norm`.

    Raises:
        UserError: nothing was decoded.
    """
    rows = bench.where(phase="decode")
    frame = drawn(rows)
    columns = list(frame[["against", "mode"]].drop_duplicates().itertuples(index=False, name=None))
    batches = sorted(frame["batch"].unique())
    width_in = style.COLUMN_IN if len(columns) < 3 else style.PAGE_IN
    note = style.wrapped(_note(bench, rows, run, caption), width_in)
    height_in = 0.95 + 1.15 * len(batches) + 0.125 * len(note.splitlines())
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        axes = figure.subplots(len(batches), len(columns), sharex=True, sharey=True, squeeze=False)
        for column, (against, mode) in enumerate(columns):
            axes[0, column].set_title(f"{MODES[mode]}, against\n{_AGAINST[against]}")
            axes[-1, column].set_xlabel("prompt (tokens)")
            for row, batch in enumerate(batches):
                cell = bands.where(frame, against=against, mode=mode, batch=batch)
                _draw(axes[row, column], cell, against, bench)
        for row, batch in enumerate(batches):
            axes[row, 0].set_ylabel(f"batch {batch}\nspeed / Baseline")
        found = {
            label: handle for one in axes.flat for handle, label in zip(*one.get_legend_handles_labels(), strict=True)
        }
        place = {"loc": "outside upper center", "ncols": 2 if len(columns) < 3 else 3, "handlelength": 1.4}
        figure.legend(found.values(), found.keys(), **place)
        figure.supxlabel(note, x=0.01, ha="left", color="#404040", linespacing=1.25)
    return figure, frame


def drawn(rows: Sequence[Row]) -> pd.DataFrame:
    """Everything the figure draws: a row per panel (against, mode, batch), prompt and arm."""
    if not rows:
        raise UserError(
            "figure_decode needs decoding, which was not measured: run `tapernorm bench decode` in some mode"
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


def _draw(axes: Axes, cell: pd.DataFrame, against: str, bench: Bench) -> None:
    """One panel: arms side by side at each prompt, a line where Baseline is."""
    prompts, arms, labels = sorted(cell["prompt"].unique()), _ARMS[against], arm_labels(bench)
    axes.axhline(1, color="#000000", linewidth=0.7)
    for index, arm in enumerate(arms):
        mine, look = bands.where(cell, arm=arm), style.ARMS[arm]
        shift = _STEP * (index - (len(arms) - 1) / 2)
        at = [prompts.index(prompt) + shift for prompt in mine["prompt"]]
        error = [mine["ratio"] - mine["low"], mine["high"] - mine["ratio"]] if bands.has(mine, "low") else None
        axes.errorbar(at, mine["ratio"], yerr=error, linestyle="none", elinewidth=0.9, label=labels[arm], **look)
        for low, high in mine[["published_low", "published_high"]].dropna().drop_duplicates().to_numpy().tolist():
            band = axes.axhspan(low, high, color=look["color"], alpha=style.BAND_ALPHA, linewidth=0)
            band.set_label(f"{published.TABLE2_SHORT}, {arm}")
    axes.set_xticks(range(len(prompts)), [str(prompt) for prompt in prompts])
    axes.set_xlim(-0.5, len(prompts) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    axes.yaxis.set_major_formatter("{x:.2f}")


def _note(bench: Bench, rows: Sequence[Row], run: str, caption: str) -> str:
    """What the reader must know: run, setting, what points and bands are, missing modes, the run's own caption."""
    eager = any(row["mode"] == "eager" for row in rows)
    theirs = f"ranges published by {published.TABLE2_SHORT} on {published.TABLE2_SETTING}"
    shown = "bands where the mode and Baseline's norm are theirs" if eager else "not drawn, they are of eager mode"
    several = max(row["n"] for row in rows) > 1
    points = "Points: median of the ratio paired by round" + (
        ", bars: its 95 % bootstrap interval." if several else "."
    )
    return " ".join(
        [f"Run {run}: {setting(bench, rows)}", points, f"The {theirs}: {shown}.", *unavailable_notes(bench), caption]
    )
