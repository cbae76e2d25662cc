"""Figure S3: row losses on every kind of input, from the median to the worst, and losses by position."""

from collections.abc import Iterator
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from ...config.odd_inputs import LONGER, OddInputsReportJob
from ...config.variants import VARIANT_LABELS
from ..engine import statistics as stats
from ..frames.odd_inputs import RobustnessRows, Row
from ..frames.odd_inputs_summary import PLAIN, records, tried_on
from . import bands, panels, style
from .figure import FigureSpec, Layout
from .figure import Row as PanelRow

ROWS, POSITIONS = "rows", "positions"  # the two panels
_APART = 0.15  # distance of models at one place, in units of the distance of places


def drawn(rows: RobustnessRows, job: OddInputsReportJob) -> pd.DataFrame:
    """Return the data of the figure, at the largest width: panel, place, positions, model, n, value, low, high.

    Panel rows: value is the mean and low the median, both averaged over seeds; high is the worst row of all seeds.
    Panel positions: median over seeds, and 2.5-97.5 percentile.

    Raises:
        UserError: there are no scores.
    """
    found = records(rows, run=job.run)
    d_model = max(row["d_model"] for row in found)
    parts = [*_rows(found, d_model), *_positions(bands.where(rows.positions, d_model=d_model))]
    return pd.DataFrame([{"run": job.run, "d_model": d_model, **part} for part in parts])


def _rows(found: list[Row], d_model: int) -> Iterator[Row]:
    for row in found:
        if row["d_model"] == d_model and row["part"] != PLAIN and not _within(row):
            named = {key: row[key] for key in ("model", "label", "n")}
            spread = {"value": row["ce_mean"], "low": row["rows_median"], "high": row["rows_max"]}
            yield {"panel": ROWS, "place": tried_on(row), **named, **spread}


def _within(row: Row) -> bool:
    """Whether a record is of the positions that longer rows share with the others."""
    return row["trial"] == LONGER and row["part_label"].startswith("positions 0–")


def _positions(here: pd.DataFrame) -> Iterator[Row]:
    for model, losses in here.groupby("model", sort=False):
        label = losses["label"].iloc[0]
        table = losses.pivot(index="seed", columns="first", values="ce")
        starts, ends = table.columns.tolist(), dict(zip(losses["first"], losses["last"], strict=True))
        median, low, high = stats.band(table.to_numpy())
        named = {"panel": POSITIONS, "model": model, "label": label, "n": len(table)}
        for first, *spread in zip(starts, median, low, high, strict=True):
            where = {"place": f"positions {first}–{ends[first] - 1}", "first": first, "last": ends[first]}
            yield {**named, **where, **dict(zip(("value", "low", "high"), spread, strict=True))}


def _layout(frame: pd.DataFrame, rows: RobustnessRows, _: OddInputsReportJob) -> Layout:
    draw = partial(_draw, context=int(rows.trials["context"].iloc[0]))
    width = f"d = {frame['d_model'].iloc[0]}"
    titles = [f"{width}: rows of every kind", f"{width}: held-out text by position"]
    both = [{"panel": ROWS}, {"panel": POSITIONS}]
    row = PanelRow(draw, both, 3.4, "", "loss (nats/token)", titles, same_y=False)
    return Layout([row], legend_columns=len(set(frame["model"])))


def _draw(axes: Axes, here: pd.DataFrame, *, context: int) -> None:
    if here["panel"].iloc[0] == ROWS:
        _draw_rows(axes, here)
        return
    axes.axvline(context, color=style.GATE["color"], linewidth=0.7, linestyle=":")
    middle = here.assign(step=(here["first"] + here["last"] - 1) / 2, median=here["value"])
    panels.curves(axes, middle, "model", style.LINES, VARIANT_LABELS, style.MARKERS)
    axes.set(xlabel="position", ylabel="loss (nats/token)")


def _draw_rows(axes: Axes, here: pd.DataFrame) -> None:
    """Places beneath one another, models beneath one another in each."""
    places, models = (list(dict.fromkeys(here[column])) for column in ("place", "model"))
    models = [model for model in style.LINES if model in models]
    for index, model in enumerate(models):
        mine, color = bands.where(here, model=model), style.LINES[model]["color"]
        at = [places.index(place) + _APART * (index - (len(models) - 1) / 2) for place in mine["place"]]
        axes.hlines(at, mine["low"], mine["high"], color=color, linewidth=0.9)
        axes.plot(mine["value"], at, color=color, linestyle="none", marker=style.MARKERS[model], markersize=3)
    axes.set_yticks(range(len(places)), [place.replace(": ", ":\n") for place in places])
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    for border in range(1, len(places)):
        axes.axhline(border - 0.5, color=style.RC["grid.color"], linewidth=style.RC["grid.linewidth"])
    axes.set_xscale("log")
    panels.log_ticks(axes.xaxis)


def _caption(frame: pd.DataFrame, rows: RobustnessRows, job: OddInputsReportJob) -> Iterator[str]:
    yield "Losses on odd inputs, and by position."
    yield f"Run {job.run}, {bands.seeds(frame)}."
    yield "Left: a line from the median row to the worst row of all seeds; the mean is marked."
    yield f"Right: the models were trained on {rows.trials['context'].iloc[0]} tokens (dotted)."
    yield panels.reading(bands.where(frame, panel=POSITIONS).assign(window=1))
    if bands.where(frame, panel=ROWS)["high"].hasnans or frame["value"].hasnans:
        yield "Values that are not finite are not drawn."
    yield job.caption


FIGURE_S3 = FigureSpec(drawn, _layout, _caption)
