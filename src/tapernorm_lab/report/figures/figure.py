"""A figure as data (rows, panels, caption), and its files."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import Container
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import Bbox

from tapernorm.util.atomic_files import whole_file, write_text

from ..table import latex_text
from . import style
from .bands import where

_LEGEND_LINE_IN = 0.15
_DECIMALS = 9  # of a position, as a fraction of the figure's size


@dataclass(frozen=True)
class Row:
    """Panels side by side; a single one takes the whole width.

    Attributes:
        draw: draws a panel on its axes, from its rows of the frame; it may replace the labels below.
        panels: selection of rows for each panel: column -> value, or a list of values.
        xlabel: label of the horizontal axis; empty: the row beneath has the axis of both.
        same_y: share one vertical axis.
    """

    draw: Callable[[Axes, pd.DataFrame], None]
    panels: Sequence[Mapping[str, Any]]
    height_in: float
    ylabel: str
    xlabel: str = ""
    titles: Sequence[str] = ()
    same_y: bool = True


@dataclass(frozen=True)
class Layout:
    """Rows of panels beneath a common legend; `same_y`: all rows share one vertical axis."""

    rows: Sequence[Row]
    width_in: float = style.PAGE_IN
    legend_columns: int = 2
    same_y: bool = False


@dataclass(frozen=True)
class Drawing:
    """A drawn figure, its data, and its caption in plain Unicode."""

    figure: Figure
    frame: pd.DataFrame
    caption: str


@dataclass(frozen=True)
class FigureSpec:
    """A specification of a figure. Each attribute is a function, whose last argument is the job that describes the run.

    Attributes:
        frame: takes the rows of the source; returns the data of the figure, which is also its CSV.
        layout: takes the data and the rows; returns the panels.
        caption: takes the data and the rows; returns sentences on what the figure shows and how to read it.
    """

    frame: Callable[[Any, Any], pd.DataFrame]
    layout: Callable[[pd.DataFrame, Any, Any], Layout]
    caption: Callable[[pd.DataFrame, Any, Any], Iterable[str]]

    def draw(self, found: Any, job: Any) -> Drawing:
        """Draw the figure.

        Raises:
            UserError: the rows hold nothing to draw, or data that one figure cannot show together.
        """
        frame = self.frame(found, job)
        caption = " ".join(filter(None, self.caption(frame, found, job)))
        return Drawing(_compose(self.layout(frame, found, job), frame), frame, caption)


def _compose(layout: Layout, frame: pd.DataFrame) -> Figure:
    heights = [row.height_in for row in layout.rows]
    columns = max(len(row.panels) for row in layout.rows)
    with matplotlib.rc_context(style.RC):
        figure = Figure(layout="constrained")
        grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
        above: dict[int, Axes | None] = {}
        for number, row in enumerate(layout.rows):
            for column, of in enumerate(row.panels):
                left = figure.axes[-1] if column and row.same_y else None
                shared = figure.axes[0] if number and layout.same_y else left
                place = grid[number, :] if len(row.panels) == 1 else grid[number, column]
                axes = figure.add_subplot(place, sharex=above.get(column), sharey=shared)
                axes.set_xlabel(row.xlabel)
                axes.set_ylabel("" if column else row.ylabel)
                axes.set_title(row.titles[column] if row.titles else "")
                axes.tick_params(labelbottom=bool(row.xlabel), labelleft=not (row.same_y and column))
                row.draw(axes, where(frame, **of))
                above[column] = None if row.xlabel else axes
        lines = _legend(figure, layout.legend_columns)
        figure.set_size_inches(layout.width_in, sum(heights) + _LEGEND_LINE_IN * lines)
    return figure


def _legend(figure: Figure, columns: int) -> int:
    """Draw the legend, each label once, points with intervals first; return its number of lines."""
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    pairs.sort(key=lambda pair: not isinstance(pair[0], Container))
    shown: dict[str, Any] = {}
    for handle, label in pairs:
        shown.setdefault(label, handle)
    if shown:
        figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=columns)
    return -(-len(shown) // columns)


def save(drawing: Drawing, stem: Path) -> None:
    """Write `stem`.pdf and .png, the data as .csv, and the caption as .md and as a float in .tex.

    Equal input gives equal files, byte for byte, at one version of matplotlib.
    """
    with whole_file(stem.with_suffix(".csv")) as temporary:
        drawing.frame.to_csv(temporary, index=False, lineterminator="\n")
    write_text(stem.with_suffix(".md"), markdown(drawing.caption) + "\n")
    write_text(stem.with_suffix(".tex"), latex(drawing, stem.name))
    undated: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "png": {"Software": None}}
    with matplotlib.rc_context(style.RC), _one_date():
        drawing.figure.set_layout_engine(RoundedLayout())
        for kind, metadata in undated.items():
            with whole_file(stem.with_suffix(f".{kind}")) as temporary:
                drawing.figure.savefig(temporary, format=kind, metadata=metadata)


def markdown(text: str) -> str:
    """Escape every character that has a meaning within a line of Markdown."""
    return re.sub(r"([\\`*_$|<\[\]])", r"\\\1", text)


def latex(drawing: Drawing, name: str) -> str:
    """Return a float with the PDF, the caption and the label of the figure."""
    kind = "figure*" if drawing.figure.get_figwidth() > style.COLUMN_IN else "figure"
    lines = [
        "% Needs \\usepackage{graphicx}",
        f"\\begin{{{kind}}}[t]",
        "\\centering",
        f"\\includegraphics[width=\\linewidth]{{{name}.pdf}}",
        f"\\caption{{{latex_text(drawing.caption)}}}\\label{{fig:{name}}}",
        f"\\end{{{kind}}}",
    ]
    return "\n".join(lines) + "\n"


class RoundedLayout(ConstrainedLayoutEngine):
    """Constrained layout with rounded positions of all axes.

    The solver orders its terms by memory address, so that the last bits of a position differ between processes.
    """

    def execute(self, fig: Figure) -> Any:
        grids = super().execute(fig)
        for axes in fig.axes:
            axes.set_position(Bbox(axes.get_position(original=True).get_points().round(_DECIMALS)), which="original")
            axes.set_in_layout(True)  # set_position clears this
        return grids


@contextmanager
def _one_date() -> Iterator[None]:
    """Fix the date in the files, as reproducible builds do. Embedded fonts carry a date as well."""
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["SOURCE_DATE_EPOCH"]
        else:
            os.environ["SOURCE_DATE_EPOCH"] = before
