"""The per-token scale at every norm, before and after a taper: where one constant has to stand for all tokens."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from . import bands, style

_FORMS = ("before", "after")
_FIRST: dict[str, Any] = {"marker": "^", "s": 9, "linewidths": 0, "color": style.LINES["all"]["color"]}
_LARGEST: dict[str, Any] = {"marker": "x", "s": 7, "linewidths": 0.7, "color": style.LINES["all_aux"]["color"]}
_GONE, _KEPT = style.LINES["internal_aux"]["color"], style.LINES["baseline"]["color"]
_CONSTANT: dict[str, Any] = {"color": "#7A7A7A", "linewidth": 0.9}
_RANGES = {gone: f"norm {word}: median, 0.1–99.9 % of tokens" for gone, word in ((True, "gone"), (False, "kept"))}
_MOST_APART = 100  # times as large, on one axis
_DECADES = 300  # of an axis, from which on only powers of ten are numbered
_NAMED = 3  # of the largest tokens


def figure_spread(rows: pd.DataFrame, *, run: str, caption: str) -> tuple[Figure, pd.DataFrame]:
    """Draw the rows of `spread_rows.read`, a panel for each form above the other, on one logarithmic scale."""
    note = style.wrapped(_note(rows, run, caption), style.PAGE_IN)
    height_in = 4.35 + 0.125 * len(note.splitlines())
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=(style.PAGE_IN, height_in), layout="constrained")
        panels = figure.subplots(2, 1, sharex=True, sharey=_comparable(rows))
        for axes, (form, title) in zip(panels, _titles(rows).items(), strict=True):
            _draw(axes, bands.where(rows, form=form))
            axes.set_title(title, loc="left")
            axes.set_ylabel("per-token scale s")
        _blocks(panels[-1], bands.where(rows, form="before"))
        shown = {name: handle for handle, name in zip(*panels[0].get_legend_handles_labels(), strict=True)}
        names = sorted(shown, key=lambda name: name not in _RANGES.values())  # the ranges first
        figure.legend([shown[name] for name in names], names, loc="outside upper center", ncols=3)
        figure.supxlabel(note, x=0.01, ha="left", color="#404040", linespacing=1.25)
    return figure, rows


def _titles(rows: pd.DataFrame) -> dict[str, str]:
    """Form -> what its panel shows; a control has no norm gone."""
    after = "tapered, at g = 0" if bool(rows["gone"].any()) else "trained, every norm kept"
    return dict(zip(_FORMS, ("before: the base model", f"after: {after}"), strict=True))


def _comparable(rows: pd.DataFrame) -> bool:
    """Whether both forms are readable on one axis; what a taper let grow without bound would flatten the other."""
    tops = [float(bands.where(rows, form=form)[["first", "largest"]].max(axis=None)) for form in _FORMS]
    return max(tops) <= _MOST_APART * min(tops)


def _draw(axes: Axes, rows: pd.DataFrame) -> None:
    axes.set_yscale("log")
    for gone, color in ((True, _GONE), (False, _KEPT)):
        mine = bands.where(rows, gone=gone)
        if not len(mine):
            continue
        ends = [mine["median"] - mine["p0_1"], mine["p99_9"] - mine["median"]]
        look: dict[str, Any] = {"linestyle": "none", "elinewidth": 1.2, "marker": "o", "markersize": 2.4}
        if not gone:
            look |= {"markerfacecolor": "#FFFFFF", "markeredgewidth": 0.8}
        axes.errorbar(mine["place"], mine["median"], yerr=ends, color=color, label=_RANGES[gone], **look)
    axes.scatter(rows["place"], rows["first"], label="position 0, median of rows", zorder=3, **_FIRST)
    axes.scatter(rows["place"], rows["largest"], label="largest token at a later position", zorder=3, **_LARGEST)
    gone = bands.where(rows, gone=True)
    if len(gone):
        ends = gone["place"] - 0.5, gone["place"] + 0.5
        axes.hlines(gone["constant"], *ends, label="the constant, 1/c", zorder=1.5, **_CONSTANT)
    for place in bands.where(rows.assign(lost=rows["nonfinite"] > 0), lost=True)["place"]:
        axes.text(place, 0.98, "∞", transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=6)
    axes.grid(visible=False, axis="x")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if high / low > _DECADES else (1, 2, 5), numticks=9))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _blocks(axes: Axes, rows: pd.DataFrame) -> None:
    """Ticks at the first norm of a block, numbered; every so many where there are many."""
    starts: dict[str, int] = {}
    for name, place in zip(rows["norm"], rows["place"], strict=True):
        found = re.search(r"\.(\d+)\.", name)
        starts.setdefault(found[1] if found else "final", int(place))
    numbered = [name for name in starts if name != "final"]
    every = max(1, round(len(numbered) / 15))
    shown = {starts[name]: name for name in [*numbered[::every], "final"] if name in starts}
    axes.set_xticks(list(shown), list(shown.values()))
    axes.set_xlim(-0.8, len(rows) - 0.2)
    axes.set_xlabel("norms in the order they run, by block")


def _note(rows: pd.DataFrame, run: str, caption: str) -> str:
    """What the reader must know: run, text, which norms are gone, the tokens of the largest scales, lost ones."""
    records = rows.to_dict("records")
    norms = [record for record in records if record["form"] == "before"]
    first = records[0]
    gone = sum(record["gone"] for record in norms)
    parts = [
        f"Run {run}: {gone} of {len(norms)} norms gone.",
        f"{first['rows']} held-out rows of {first['context']} tokens ({first['text']}).",
    ]
    for form in _FORMS:
        mine = [record for record in records if record["form"] == form]
        parts.append(f"Largest tokens {form}, in multiples of the median: {', '.join(_largest(mine))}.")
        if (lost := max(record["nonfinite"] for record in mine)) > 0:
            parts.append(f"∞: up to {lost} tokens {form} have no finite scale; what reaches them is not drawn.")
    return " ".join([*parts, caption]).strip()


def _largest(records: Sequence[Mapping[Any, Any]]) -> list[str]:
    """The tokens of the largest scales at later positions, each piece once."""
    times = [(record["largest"] / record["median"], record) for record in records]
    found: dict[str, str] = {}
    for factor, record in sorted((pair for pair in times if pair[0] > 0), key=lambda pair: -pair[0]):
        piece = record["piece"]
        found.setdefault(piece, f"{piece!r} at position {record['position']} ({factor:.3g})")
    return list(found.values())[:_NAMED]
