"""The figure of the per-token scale at every norm, before and after a taper, with the constant that replaces it."""

import re
from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from ..frames.own_models import OwnRows
from . import bands, panels, style
from .figure import FigureSpec, Layout, Row

_FORMS = ("before", "after")
_FIRST: dict[str, Any] = {"marker": "^", "s": 9, "linewidths": 0, "color": style.LINES["all"]["color"]}
_LARGEST: dict[str, Any] = {"marker": "x", "s": 7, "linewidths": 0.7, "color": style.LINES["all_aux"]["color"]}
_GONE, _KEPT = style.LINES["internal_aux"]["color"], style.LINES["baseline"]["color"]
_RANGE: dict[str, Any] = {"linestyle": "none", "elinewidth": 1.2, "marker": "o", "markersize": 2.4}
_CONSTANT: dict[str, Any] = {"color": "#7A7A7A", "linewidth": 0.9}
_BLOCKS = "norms in the order they run, by block"
_MOST_APART = 100  # largest ratio of two forms on one axis
_NAMED = 3  # tokens named in the caption


def drawn(found: OwnRows, label: str) -> pd.DataFrame:
    """Return the scales at every norm of the taper `label`, in both forms."""
    return found.spread_of(label)


def _layout(rows: pd.DataFrame, *_: Any) -> Layout:
    """Lay out one panel per form, one above the other."""
    after = "tapered, at g = 0" if bool(rows["gone"].any()) else "trained, every norm kept"
    shared = {"height_in": 2.05, "ylabel": "per-token scale s"}
    both = [
        Row(_draw, [{"form": "before"}], titles=["before: the base model"], **shared),
        Row(_draw, [{"form": "after"}], xlabel=_BLOCKS, titles=[f"after: {after}"], **shared),
    ]
    return Layout(both, legend_columns=3, same_y=_comparable(rows))


def _comparable(rows: pd.DataFrame) -> bool:
    """Whether both forms fit on one axis, so that a form with huge scales does not flatten the other."""
    tops = [float(bands.where(rows, form=form)[["first", "largest"]].max(axis=None)) for form in _FORMS]
    return max(tops) <= _MOST_APART * min(tops)


def _draw(axes: Axes, rows: pd.DataFrame) -> None:
    axes.set_yscale("log")
    for word, color, filling in (("gone", _GONE, None), ("kept", _KEPT, "#FFFFFF")):
        mine = bands.where(rows, gone=word == "gone")
        if len(mine):
            axes.errorbar(
                mine["place"],
                mine["median"],
                yerr=[mine["median"] - mine["p0_1"], mine["p99_9"] - mine["median"]],
                label=f"norm {word}: median, 0.1–99.9 % of tokens",
                color=color,
                markerfacecolor=filling,
                **_RANGE,
            )
    axes.scatter(rows["place"], rows["first"], label="position 0, median of rows", zorder=3, **_FIRST)
    axes.scatter(rows["place"], rows["largest"], label="largest token at a later position", zorder=3, **_LARGEST)
    gone = bands.where(rows, gone=True)
    if len(gone):
        ends = gone["place"] - 0.5, gone["place"] + 0.5
        axes.hlines(gone["constant"], *ends, label="the constant, 1/c", zorder=1.5, **_CONSTANT)
    for place in rows["place"][rows["nonfinite"] > 0]:
        axes.text(place, 0.98, "∞", transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=6)
    axes.grid(visible=False, axis="x")
    panels.log_ticks(axes.yaxis)
    _blocks(axes, rows)


def _blocks(axes: Axes, rows: pd.DataFrame) -> None:
    """Label the first norm of each block, or of every k-th block if there are many."""
    starts: dict[str, int] = {}
    for name, place in zip(rows["norm"], rows["place"], strict=True):
        found = re.search(r"\.(\d+)\.", name)
        starts.setdefault(found[1] if found else "final", int(place))
    numbered = [name for name in starts if name != "final"]
    every = max(1, round(len(numbered) / 15))
    shown = {starts[name]: name for name in [*numbered[::every], "final"] if name in starts}
    axes.set_xticks(list(shown), list(shown.values()))
    axes.set_xlim(-0.8, len(rows) - 0.2)


def _caption(rows: pd.DataFrame, found: OwnRows, label: str) -> Iterator[str]:
    """Yield the sentences of the caption: run, text, tapered norms, tokens of the largest scales, scales not finite."""
    first, gone = rows.iloc[0], bands.where(rows, form="before")["gone"]
    yield "Per-token scale at every norm, before and after."
    yield f"Run {found.run}, {label}: {gone.sum()} of {len(gone)} norms gone."
    yield f"{first['rows']} held-out rows of {first['context']} tokens ({first['text']})."
    for form in _FORMS:
        mine = bands.where(rows, form=form)
        yield f"Largest tokens {form}, in multiples of the median: {_largest(mine)}."
        if (lost := max(mine["nonfinite"])) > 0:
            yield f"∞: up to {lost} tokens {form} have no finite scale; quantiles that include them are not drawn."
    yield found.caption


def _largest(rows: pd.DataFrame) -> str:
    """Name the tokens of the largest scales at later positions, each piece once."""
    times = rows.assign(times=rows["largest"] / rows["median"]).sort_values("times", ascending=False, kind="stable")
    named = pd.DataFrame(times[times["times"] > 0]).drop_duplicates(["piece"]).head(_NAMED).to_dict("records")
    return ", ".join(f"{row['piece']!r} at position {row['position']} ({row['times']:.3g})" for row in named)


FIGURE_SPREAD = FigureSpec(drawn, _layout, _caption)
