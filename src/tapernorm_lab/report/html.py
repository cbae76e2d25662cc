"""A table or a figure as a self-contained HTML page."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from tapernorm.util.atomic_files import write_text

from .table import ABSENT, Column, Table

# Every rule names the class, because Snakemake's report also embeds the pages in its own. It centres them in a list,
# which hides the top of a long page, and repeats them beside its graph of rules, in a column that is too narrow.
_STYLE = """
.tapernorm { padding: 1.5em; font: 14px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
ul .tapernorm { width: 68em; }
.h-screen:has(ul .tapernorm) { align-items: flex-start; }
.py-2 .tapernorm { display: none; }
.tapernorm p { max-width: 60em; }
.tapernorm img { max-width: 60em; width: 100%; }
.tapernorm table { width: auto; border-collapse: collapse; border: solid #1a1a1a; border-width: 2px 0; }
.tapernorm th, .tapernorm td { padding: .25em .7em; vertical-align: top; text-align: right; white-space: nowrap; }
.tapernorm th { font-weight: 600; border-bottom: 1px solid #1a1a1a; vertical-align: bottom; }
.tapernorm th.group { text-align: center; border-bottom: 1px solid #999; }
.tapernorm .l { text-align: left; }
.tapernorm .wide { white-space: normal; min-width: 16em; max-width: 30em; }
.tapernorm tbody tr:nth-child(even) { background: #f6f6f6; }
.tapernorm tbody.published { border-top: 1px solid #1a1a1a; color: #555; }
.tapernorm code { font-family: ui-monospace, monospace; white-space: pre-wrap; }
.tapernorm li { max-width: 70em; }
"""
_WIDE = 48  # characters of a cell above which a column wraps


def write(table: Table, folder: Path) -> None:
    """Write `folder`/`table.name`.html."""
    write_text(folder / f"{table.name}.html", page(table))


def write_figure(caption: str, stem: Path) -> None:
    """Write `stem`.html: the picture `stem`.png, embedded, above its caption."""
    picture = b64encode(stem.with_suffix(".png").read_bytes()).decode()
    lines = [f'<img alt="{escape(stem.name)}" src="data:image/png;base64,{picture}">', f"<p>{escape(caption)}</p>"]
    write_text(stem.with_suffix(".html"), _document(stem.name, lines))


def _document(title: str, lines: Iterable[str]) -> str:
    head = f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    start = ["<!DOCTYPE html>", head, f'<style>{_STYLE}</style></head><body><main class="tapernorm">']
    return "\n".join([*start, *lines, "</main></body></html>"]) + "\n"


def page(table: Table) -> str:
    """Return the page of a table: caption, table and notes, with the rows of other publications set apart."""
    rows = [*table.rows, *table.published]
    classes = [_class_of(column, [row[i] for row in rows]) for i, column in enumerate(table.columns)]
    lines = [
        f"<p>{escape(table.caption)}</p>",
        f'<table id="{escape(table.name)}">',
        *_head(table.columns, classes),
        *_body(table.columns, classes, table.rows, ""),
        *(_body(table.columns, classes, table.published, ' class="published"') if table.published else ()),
        "</table>",
        "<ul>",
        *(f"<li>{escape(note)}</li>" for note in table.notes),
        "</ul>",
    ]
    return _document(table.name, lines)


def _class_of(column: Column, cells: Sequence[str]) -> str:
    names = [column.align if column.align == "l" else ""]
    names += ["wide"] if max(map(len, cells), default=0) > _WIDE else []
    return " ".join(filter(None, names))


def _head(columns: Sequence[Column], classes: Sequence[str]) -> list[str]:
    """The headers, under those of their groups where there are any."""
    lines = ["<thead>"]
    if any(column.group for column in columns):
        spans = [(group, len(list(members))) for group, members in groupby(columns, key=lambda c: c.group)]
        cells = [f'<th colspan="{n}"{_group_class(group)}>{escape(group)}</th>' for group, n in spans]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    headers = [f'<th class="{name}">{escape(c.header)}</th>' for c, name in zip(columns, classes, strict=True)]
    return [*lines, f"<tr>{''.join(headers)}</tr>", "</thead>"]


def _group_class(group: str) -> str:
    return ' class="group"' if group else ""


def _body(columns: Sequence[Column], classes: Sequence[str], rows: Sequence[Sequence[str]], more: str) -> list[str]:
    lines = [f"<tbody{more}>"]
    for row in rows:
        cells = [
            f'<td class="{name}">{_cell(column, cell)}</td>'
            for column, name, cell in zip(columns, classes, row, strict=True)
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return [*lines, "</tbody>"]


def _cell(column: Column, text: str) -> str:
    return f"<code>{escape(text)}</code>" if column.code and text not in ("", ABSENT) else escape(text)
