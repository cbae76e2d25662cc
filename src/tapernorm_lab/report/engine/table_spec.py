"""A table as data: its columns, each with the formatter of its cells, and which records share a line."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..table import ABSENT, Column, Table
from .cells import Cell
from .frame import Row


@dataclass(frozen=True)
class Shown:
    """A column of a table and what it says of each line.

    Attributes:
        header, group, align, code, timed: as in `Column`.
        cell: of a record, the line's first or that of the member `of`; absent where the line has no such member.
        of: the member of a line, such as a variant.
        once: columns of the records. The cell stays empty where a line agrees in them with the line above.
    """

    header: str
    cell: Cell
    group: str = ""
    align: Literal["l", "r"] = "r"
    code: bool = False
    timed: Literal["", "speed", "ratio"] = ""
    of: str = ""
    once: Sequence[str] = ()

    @property
    def column(self) -> Column:
        return Column(self.header, self.group, self.align, self.code, self.timed)


@dataclass(frozen=True)
class TableSpec:
    """What a table shows of its records.

    Attributes:
        name: file stem.
        columns: in their order.
        line: columns in which the records of a line agree; without any, each record has a line.
        member: the column that tells the records of a line apart.
        order: columns by which records are ordered in print, their values in the order in which they first stand.
        printed: whether a record is printed; the CSV holds all.
    """

    name: str
    columns: Sequence[Shown]
    line: Sequence[str] = ()
    member: str = ""
    order: Sequence[str] = ()
    printed: Callable[[Row], bool] = lambda _: True

    def table(
        self,
        records: Sequence[Row],
        *,
        caption: str,
        notes: Iterable[str],
        published: Sequence[Sequence[str]] = (),
    ) -> Table:
        """The table of these records, above `published`, rows of others' numbers."""
        return Table(
            name=self.name,
            columns=[one.column for one in self.columns],
            rows=self.lines(records),
            published=published,
            caption=caption,
            notes=list(notes),
            records=records,
        )

    def lines(self, records: Iterable[Row]) -> list[list[str]]:
        """The cells of each line."""
        shown = [record for record in records if self.printed(record)]
        for name in reversed(self.order):
            places = list(dict.fromkeys(record[name] for record in shown))
            shown.sort(key=lambda record, name=name, places=places: places.index(record[name]))
        lines: dict[Any, dict[Any, Row]] = {}
        for number, record in enumerate(shown):
            place = tuple(record[name] for name in self.line) or number
            lines.setdefault(place, {})[record[self.member] if self.member else ""] = record
        above: Mapping[str, Any] = {}
        rows = []
        for members in lines.values():
            first = next(iter(members.values()))
            rows.append([_cell(one, members.get(one.of) if one.of else first, above) for one in self.columns])
            above = first
        return rows


def _cell(shown: Shown, record: Row | None, above: Mapping[str, Any]) -> str:
    if record is None:
        return ABSENT
    if shown.once and above and all(record[name] == above[name] for name in shown.once):
        return ""
    return shown.cell(record)
