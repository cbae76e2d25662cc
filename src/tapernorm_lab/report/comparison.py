"""The comparison of two tables: values by their printed digits, speeds by their ratios."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .table import ABSENT, Table

_NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_INTERVAL = re.compile(r"\[([^,\]]+), ([^,\]]+)\]")
_FEW = 5  # differences listed per table


@dataclass(frozen=True)
class Difference:
    """A printed cell that differs between two tables."""

    row: str
    column: str
    here: str
    published: str
    change: float  # of the first number in the cell; NaN if either side has no number


@dataclass
class Comparison:
    """How a table compares with the published table of its name."""

    name: str
    values: int = 0  # printed on both sides, without ratios of speeds
    differing: list[Difference] = field(default_factory=list)
    equal: int = 0  # values with the same digits
    inside: int = 0  # ratios of speeds within the published interval
    outside: list[Difference] = field(default_factory=list)  # the other ratios
    only_here: list[str] = field(default_factory=list)  # rows and columns
    only_published: list[str] = field(default_factory=list)


def compare(here: Table, published: Table, columns: Sequence[str] | None = None) -> Comparison:
    """Compare two tables cell by cell, without the rows of other publications at the foot.

    Speeds are not compared, because they differ between machines. A ratio of speeds counts as inside if the published
    interval contains it. A ratio published without an interval is left out.

    Args:
        columns: compare only these; None: all that both tables have.
    """
    made = Comparison(here.name)
    keys = max(_key_columns(here), _key_columns(published))
    ours, theirs = _cells(here, keys), _cells(published, keys)
    headers, known = _headers(here), _headers(published)
    made.only_here = [*(row for row in ours if row not in theirs), *(h for h in headers[keys:] if h not in known)]
    made.only_published = [*(row for row in theirs if row not in ours), *(h for h in known[keys:] if h not in headers)]
    timed = {header: column.timed for header, column in zip(known, published.columns, strict=True)}
    for row in (row for row in ours if row in theirs):
        for header in (header for header in headers[keys:] if header in timed):
            if columns is None or header in columns:
                _compare_cell(made, row, header, ours[row][header], theirs[row][header], timed[header])
    return made


def _compare_cell(made: Comparison, row: str, column: str, here: str, published: str, timed: str) -> None:
    difference = Difference(row, column, here, published, _change(here, published))
    if timed == "ratio":
        interval = _INTERVAL.search(published)
        if interval and not math.isnan(difference.change):
            low, high = map(_number, interval.groups())
            if low <= _number(_NUMBER.findall(here)[0]) <= high:
                made.inside += 1
            else:
                made.outside.append(difference)
    elif not timed and {here, published} - {"", ABSENT}:
        ours, theirs = (_NUMBER.findall(text) or [text] for text in (here, published))
        same = sum(a == b for a, b in zip(ours, theirs, strict=False))
        made.values += max(len(ours), len(theirs))
        made.equal += same
        if same < max(len(ours), len(theirs)):
            made.differing.append(difference)


def _change(here: str, published: str) -> float:
    numbers = [_NUMBER.findall(text)[:1] for text in (here, published)]
    if not all(numbers):
        return math.nan
    return _number(numbers[0][0]) - _number(numbers[1][0])


def _number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def _headers(table: Table) -> list[str]:
    return [f"{column.group}: {column.header}" if column.group else column.header for column in table.columns]


def _filled(table: Table) -> list[list[str]]:
    """Return the rows with every empty cell filled from the row above."""
    rows: list[list[str]] = []
    for row in table.rows:
        above = rows[-1] if rows else row
        rows.append([cell or above[i] for i, cell in enumerate(row)])
    return rows


def _key_columns(table: Table) -> int:
    """Return the least number of leading columns that distinguishes all rows."""
    rows = _filled(table)
    counts = range(1, len(table.columns))
    return next((n for n in counts if len({tuple(row[:n]) for row in rows}) == len(rows)), len(table.columns))


def _cells(table: Table, keys: int) -> dict[str, dict[str, str]]:
    """Return row -> column -> printed cell."""
    headers = _headers(table)
    return {
        ", ".join(_named(header, cell) for header, cell in zip(headers[:keys], filled[:keys], strict=True)): dict(
            zip(headers, row, strict=True)
        )
        for row, filled in zip(table.rows, _filled(table), strict=True)
    }


def _named(header: str, cell: str) -> str:
    return f"{header} {cell}" if _NUMBER.fullmatch(cell) else cell


def lines(made: Comparison, *, every: bool = False) -> Iterator[str]:
    """Yield the lines of a comparison: the counts, then the differences, with `every` all of them."""
    counts = []
    if made.values:
        counts.append(f"{made.equal} of {made.values} values equal the published ones to the printed digit")
    if ratios := made.inside + len(made.outside):
        counts.append(f"{made.inside} of {ratios} speed ratios lie inside the published intervals")
    yield f"{made.name}: {'; '.join(counts) or 'no value on both sides'}"
    for differences, beside in ((made.differing, "published"), (made.outside, "outside the published")):
        ordered = sorted(differences, key=_size, reverse=True)
        shown = ordered if every else ordered[:_FEW]
        for one in shown:
            change = "" if math.isnan(one.change) else f" ({_signed(one.change)})"
            yield f"    {one.row}, {one.column}: {one.here} here, {beside} {one.published}{change}"
        if len(shown) < len(ordered):
            yield f"    and {len(ordered) - len(shown)} more, with smaller changes: --all lists them"
    for side, names in (("here", made.only_here), ("published", made.only_published)):
        if names:
            yield f"    only {side}: {'; '.join(names)}"


def _size(one: Difference) -> float:
    """Return the change relative to the published number; infinite if either side has no number."""
    published = _NUMBER.findall(one.published)
    return math.inf if math.isnan(one.change) else abs(one.change) / (abs(_number(published[0])) or 1.0)


def _signed(change: float) -> str:
    return f"{change:+.4g}".replace("-", "−")
