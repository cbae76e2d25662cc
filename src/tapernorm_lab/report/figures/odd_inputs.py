"""Figure S3: row losses on every kind of input, from the median to the worst, and losses by position."""

from collections.abc import Iterator
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from tapernorm.util.errors import UserError

from ...config.odd_inputs import LONGER
from ..engine import statistics as stats
from ..frames.odd_inputs import RobustnessRows, Row
from ..frames.odd_inputs_summary import PLAIN, records, tried_on
from . import bands, style

ROWS, POSITIONS = "rows", "positions"  # the two panels
Looks = dict[str, dict[str, Any]]  # model -> its line and marker
_APART = 0.15  # between models at one place, of the distance of places
_HEIGHT_IN = 3.4


def figure_s3(
    rows: RobustnessRows, *, run: str, caption: str, d_model: int | None = None
) -> tuple[Figure, pd.DataFrame]:
    """Draw one width, by default the widest.

    Raises:
        UserError: there are no scores, or none of that width.
    """
    frame = drawn(rows, run=run, d_model=d_model)
    width, context = int(frame["d_model"].iloc[0]), int(rows.trials["context"].iloc[0])
    looks = _looks(frame)
    note = style.wrapped(_note(frame, context, run, caption), style.PAGE_IN)
    size = (style.PAGE_IN, _HEIGHT_IN + 0.125 * len(note.splitlines()))
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=size, layout="constrained")
        left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.15, 1)})
        _draw_rows(left, bands.where(frame, panel=ROWS), looks)
        _draw_positions(right, bands.where(frame, panel=POSITIONS), looks, context)
        left.set_title(f"d = {width}: rows of every kind")
        right.set_title(f"d = {width}: held-out text by position")
        labels = frame.drop_duplicates("model").set_index("model")["label"]
        figure.legend(
            handles=[Line2D([], [], label=labels[model], **look) for model, look in looks.items()],
            loc="outside upper center",
            ncols=len(looks),
        )
        figure.supxlabel(note, x=0.01, ha="left", color="#404040", linespacing=1.25)
    return figure, frame


def drawn(rows: RobustnessRows, *, run: str, d_model: int | None = None) -> pd.DataFrame:
    """Everything the figure draws: panel, place, first and last position, model, n, value, low, high.

    Of rows: mean of the seeds' means, mean of their medians, the worst row of all; of positions: median over seeds and
    2.5-97.5 percentile.
    """
    found = records(rows, run=run)
    widths = sorted({row["d_model"] for row in found})
    if d_model is not None and d_model not in widths:
        raise UserError(f"no scores at d_model {d_model}: this run has {', '.join(map(str, widths))}")
    chosen = widths[-1] if d_model is None else d_model
    parts = [*_rows(found, chosen), *_positions(bands.where(rows.positions, d_model=chosen))]
    return pd.DataFrame([{"run": run, "d_model": chosen, **part} for part in parts])


def _rows(found: list[Row], d_model: int) -> Iterator[Row]:
    for row in found:
        if row["d_model"] == d_model and row["part"] != PLAIN and not _within(row):
            named = {key: row[key] for key in ("model", "label", "n")}
            spread = {"value": row["ce_mean"], "low": row["rows_median"], "high": row["rows_max"]}
            yield {"panel": ROWS, "place": tried_on(row), **named, **spread}


def _within(row: Row) -> bool:
    """Whether these are the positions that longer rows share with the others."""
    return row["trial"] == LONGER and row["part_label"].startswith("positions 0–")


def _positions(here: pd.DataFrame) -> Iterator[Row]:
    for model in here["model"].unique():
        losses = bands.where(here, model=model)
        table = losses.pivot(index="seed", columns="first", values="ce")
        starts, ends = table.columns.tolist(), dict(zip(losses["first"], losses["last"], strict=True))
        median, low, high = stats.band(table.to_numpy())
        named = {"panel": POSITIONS, "model": model, "label": losses["label"].iloc[0], "n": len(table)}
        for first, *spread in zip(starts, median, low, high, strict=True):
            where = {"place": f"positions {first}–{ends[first] - 1}", "first": first, "last": ends[first]}
            yield {**named, **where, **dict(zip(("value", "low", "high"), spread, strict=True))}


def _looks(frame: pd.DataFrame) -> Looks:
    shapes = "oDs^v"  # they tell models apart in grey
    models = list(dict.fromkeys(frame["model"]))
    return {
        model: {**style.LINES[model], "marker": shape, "markersize": 3.0}
        for model, shape in zip((m for m in style.LINES if m in models), shapes, strict=False)
    }


def _draw_rows(axes: Axes, here: pd.DataFrame, looks: Looks) -> None:
    """Places beneath one another, models beneath one another in each."""
    places = list(dict.fromkeys(here["place"]))
    for index, (model, look) in enumerate(looks.items()):
        mine = bands.where(here, model=model)
        at = [places.index(place) + _APART * (index - (len(looks) - 1) / 2) for place in mine["place"]]
        axes.hlines(at, mine["low"], mine["high"], color=look["color"], linewidth=0.9)
        axes.plot(mine["value"], at, **{**look, "linestyle": "none"})
    axes.set_yticks(range(len(places)), [place.replace(": ", ":\n") for place in places])
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    for border in range(1, len(places)):
        axes.axhline(border - 0.5, color=style.RC["grid.color"], linewidth=style.RC["grid.linewidth"])
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("loss (nats/token)")


def _draw_positions(axes: Axes, here: pd.DataFrame, looks: Looks, context: int) -> None:
    axes.axvline(context, color=style.GATE["color"], linewidth=0.7, linestyle=":")
    for model, look in looks.items():
        mine = bands.where(here, model=model)
        middle = (mine["first"] + mine["last"] - 1) / 2
        if bands.has(mine, "low"):
            span = (middle, mine["low"], mine["high"])
            axes.fill_between(*span, color=look["color"], alpha=style.BAND_ALPHA, linewidth=0)
        axes.plot(middle, mine["value"], **look)
    axes.set(xlabel="position", ylabel="loss (nats/token)")


def _note(frame: pd.DataFrame, context: int, run: str, caption: str) -> str:
    counts = sorted(set(frame["n"]))
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
    several = "seeds" if counts[-1] > 1 else "seed"
    band = "; line: median, band: 2.5–97.5 percentile over seeds" if counts[-1] > 1 else ""
    gaps = bands.where(frame, panel=ROWS)["high"].hasnans or frame["value"].hasnans
    lost = " What is not finite is not drawn." if gaps else ""
    return (
        f"Run {run}, {seeds} {several}. Left: a line from the median row to the worst row of all seeds, the mean"
        f" marked. Right: trained on {context} tokens (dotted){band}.{lost} {caption}"
    )
