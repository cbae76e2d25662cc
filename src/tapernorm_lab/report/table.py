"""A table as text cells, and its writers: CSV in full precision, Markdown and LaTeX as printed."""

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal

from tapernorm.util.atomic_files import whole_file, write_text

ABSENT = "—"


@dataclass(frozen=True)
class Column:
    """A column: its header, the header of its group, and how its cells are written."""

    header: str
    group: str = ""
    align: Literal["l", "r"] = "r"
    code: bool = False  # cells are set as code
    timed: Literal["", "speed", "ratio"] = ""  # a speed, or a ratio of two, which no other run reproduces exactly


PAGE_ROWS = 45  # rows of a LaTeX float that fit on a page with caption and notes
PARAGRAPH = 60  # characters of a cell above which LaTeX wraps the column
PARAGRAPH_LINE = 35  # characters of a wrapped line, about
_PARAGRAPH = "p{5cm}"


@dataclass(frozen=True)
class Table:
    """Printed cells and the numbers behind them. All text is plain Unicode, which the writers escape."""

    name: str  # file stem, and the LaTeX label
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    published: Sequence[Sequence[str]]  # rows of other publications, set apart at the foot
    caption: str
    notes: Sequence[str]
    records: Sequence[Mapping[str, Any]]  # the rows of the CSV, in full precision


def write(table: Table, folder: Path, kinds: Iterable[str] = ("csv", "md", "tex")) -> None:
    """Write `folder`/`table.name` as files of these kinds."""
    for kind in kinds:
        if kind == "csv":
            write_csv(table, folder)
        else:
            write_text(folder / f"{table.name}.{kind}", {"md": markdown, "tex": latex}[kind](table))


def write_csv(table: Table, folder: Path) -> None:
    """Write `folder`/`table.name`.csv: the records in full precision."""
    with (
        whole_file(folder / f"{table.name}.csv") as temporary,
        open(temporary, "w", encoding="utf-8", newline="") as file,
    ):
        columns = dict.fromkeys(key for record in table.records for key in record)
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: v for k, v in record.items() if not _missing(v)} for record in table.records)


def _missing(value: Any) -> bool:
    """Whether a cell of the CSV stays empty."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def markdown(table: Table) -> str:
    """Return caption, pipe table and notes. Padding aligns the columns of the plain text."""
    header = [f"{c.group}: {c.header}" if c.group else c.header for c in table.columns]
    cells = [_written(table.columns, row, str, _code_span) for row in [*table.rows, *table.published]]
    body = [[cell.replace("|", "\\|") for cell in row] for row in [header, *cells]]
    widths = [max(3, *map(len, column)) for column in zip(*body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column.align == "l" else cell.rjust(width)
            for cell, width, column in zip(cells, widths, table.columns, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        ":" + "-" * (width - 1) if column.align == "l" else "-" * (width - 1) + ":"
        for width, column in zip(widths, table.columns, strict=True)
    ]
    lines = [line(body[0]), line(rule), *map(line, body[1:])]
    return "\n".join([table.caption, "", *lines, "", *(f"- {note}" for note in table.notes)]) + "\n"


def _written(
    columns: Sequence[Column], row: Sequence[str], plain: Callable[[str], str], code: Callable[[str], str]
) -> list[str]:
    """Format the cells of a row by `plain`, those of code columns by `code`."""
    pairs = zip(columns, row, strict=True)
    return [(code if column.code and cell not in ("", ABSENT) else plain)(cell) for column, cell in pairs]


def _code_span(text: str) -> str:
    """Return Markdown code, fenced by more backticks than any run of them in `text`."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text or text != text.strip() else f"{fence}{text}{fence}"


def latex(table: Table) -> str:
    """Return `table*` floats for booktabs and graphicx, one per page of rows, with the notes beneath the last.

    A float that is wider than the page is shrunk. A rule separates groups. A group is a row and all following rows with
    an empty first cell.
    """
    shown = [*table.rows, *table.published]
    aligns = [_latex_align(column, [row[i] for row in shown]) for i, column in enumerate(table.columns)]
    pages = _pages(table.rows, [i for i, align in enumerate(aligns) if align == _PARAGRAPH])
    lines = ["% Needs \\usepackage{booktabs,graphicx}"]
    for number, page in enumerate(pages, start=1):
        last = number == len(pages)
        part = f" (part {number} of {len(pages)})" if len(pages) > 1 else ""
        lines += _latex_float(table, page, "".join(aligns), part, first=number == 1, last=last)
    return "\n".join(lines) + "\n"


def _pages(rows: Sequence[Sequence[str]], paragraphs: Sequence[int]) -> list[list[list[Sequence[str]]]]:
    """Return the groups of rows of each float. Pages are filled, and cut only between groups.

    Args:
        paragraphs: indices of the columns that wrap.
    """
    grouped = any(row[0] == "" for row in rows)
    pages: list[list[list[Sequence[str]]]] = [[]]
    left = PAGE_ROWS
    for group in _groups(rows) if grouped else ([row] for row in rows):
        height = sum(max([1, *(math.ceil(len(row[i]) / PARAGRAPH_LINE) for i in paragraphs)]) for row in group)
        if pages[-1] and height > left:
            pages.append([])
            left = PAGE_ROWS
        pages[-1].append(group)
        left -= height
    return pages if grouped else [[list(chain(*page))] for page in pages]


def _groups(rows: Sequence[Sequence[str]]) -> list[list[Sequence[str]]]:
    """Return the groups of rows. A group longer than a page is cut, and each part repeats the first cell."""
    groups: list[list[Sequence[str]]] = []
    name = ""
    for row in rows:
        name = row[0] or name
        if groups and row[0] == "" and len(groups[-1]) < PAGE_ROWS:
            groups[-1].append(row)
        else:
            groups.append([[name, *row[1:]]])
    return groups


def _latex_float(
    table: Table, groups: list[list[Sequence[str]]], align: str, part: str, *, first: bool, last: bool
) -> list[str]:
    columns = table.columns
    bodies = [*groups, table.published] if last and table.published else groups
    body = [line for group in bodies for line in ("\\midrule", *(_latex_row(columns, row) for row in group))]
    lines = [
        "\\begin{table*}[t]",
        "\\centering\\small\\setlength{\\tabcolsep}{4pt}",
        *([] if first else ["\\addtocounter{table}{-1}"]),  # all parts bear one number
        f"\\caption{{{latex_text(table.caption + part)}}}" + (f"\\label{{tab:{table.name}}}" if first else ""),
        "\\resizebox{\\ifdim\\width>\\textwidth\\textwidth\\else\\width\\fi}{!}{%",
        f"\\begin{{tabular}}{{@{{}}{align}@{{}}}}",
        "\\toprule",
        *_latex_groups(columns),
        _latex_line([column.header for column in columns]),
        *body,
        "\\bottomrule",
        "\\end{tabular}}",
    ]
    if last:
        notes = [f"{latex_text(note)}\\par" for note in table.notes]
        lines += ["\\par\\smallskip\\begin{minipage}{\\linewidth}\\footnotesize", *notes, "\\end{minipage}"]
    return [*lines, "\\end{table*}"]


def _latex_align(column: Column, cells: Sequence[str]) -> str:
    """Return the alignment of a column; a column with long sentences wraps."""
    return _PARAGRAPH if column.align == "l" and max(map(len, cells), default=0) > PARAGRAPH else column.align


def _latex_groups(columns: Sequence[Column]) -> list[str]:
    """Return the line of group headers and the line of their rules; empty if no column has a group."""
    cells, rules, start = [], [], 1
    for group, members in groupby(columns, key=lambda c: c.group):
        span = len(list(members))
        cells.append(f"\\multicolumn{{{span}}}{{c}}{{{latex_text(group)}}}" if group else " & " * (span - 1))
        if group:
            rules.append(f"\\cmidrule(lr){{{start}-{start + span - 1}}}")
        start += span
    return [" & ".join(cells) + " \\\\", "".join(rules)] if rules else []


def _latex_row(columns: Sequence[Column], row: Sequence[str]) -> str:
    return " & ".join(_written(columns, row, latex_text, lambda text: f"\\texttt{{{latex_text(text)}}}")) + " \\\\"


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(map(latex_text, cells)) + " \\\\"


_LATEX = {
    "\\": "\\textbackslash{}",
    "{": "\\{",
    "}": "\\}",
    "&": "\\&",
    "%": "\\%",
    "$": "\\$",
    "#": "\\#",
    "_": "\\_",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "|": "\\textbar{}",
    "[": "{[}",  # LaTeX reads a bare bracket after a line's end as its argument
    "]": "{]}",
    "±": "$\\pm$",
    "−": "$-$",
    "—": "---",
    "–": "--",
    "†": "$\\dagger$",
}


def latex_text(text: str) -> str:
    """Escape every character that has a meaning in LaTeX."""
    return "".join(_LATEX.get(character, character) for character in text)
