"""A table as data: columns with the formatters of their cells, the records of a line, and fixed notes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..provenance import device_and_code, of_several_codes, short_commits
from ..table import ABSENT, Column, Table
from .cells import Cell
from .frame import Row


@dataclass(frozen=True)
class Shown:
    """A column of a table and the formatter of its cells.

    Attributes:
        header, group, align, code, timed: as in `Column`.
        cell: formats a record: the first of the line, or its member `of`. A line without that member gets `ABSENT`.
        of: member of a line, such as a variant.
        once: columns of the records. The cell is empty if the line above has the same values in them.
        note: meaning of the column, printed beneath the table.
    """

    header: str
    cell: Cell
    group: str = ""
    align: Literal["l", "r"] = "r"
    code: bool = False
    timed: Literal["", "speed", "ratio"] = ""
    of: str = ""
    once: Sequence[str] = ()
    note: str = ""

    @property
    def column(self) -> Column:
        return Column(self.header, self.group, self.align, self.code, self.timed)


class Told(Protocol):
    """A description of a run: its name, and a sentence for each table."""

    @property
    def run(self) -> str: ...
    @property
    def caption(self) -> str: ...


@dataclass(frozen=True)
class TableSpec:
    """A specification of a table: how it prints its records.

    Attributes:
        name: file stem.
        title: first sentence of the caption.
        columns: the columns, in order.
        notes: fixed notes, printed after those of the columns.
        line: columns that group records into lines; empty: each record is a line.
        member: column that distinguishes the records of a line.
        order: columns by which the printed records are sorted, each by the first appearance of its values.
        printed: selects the records to print; the CSV holds all.
    """

    name: str
    title: str
    columns: Sequence[Shown]
    notes: Sequence[str] = ()
    line: Sequence[str] = ()
    member: str = ""
    order: Sequence[str] = ()
    printed: Callable[[Row], bool] = lambda _: True

    def table(
        self,
        records: Sequence[Row],
        job: Told,
        *,
        notes: Iterable[str] = (),
        runs: Sequence[Mapping[str, Any]] = (),
        setting: str = "",
        published: Sequence[Sequence[str]] = (),
    ) -> Table:
        """Return the table of these records.

        Args:
            job: description of the run, for the end of the caption.
            notes: notes on these records.
            runs: the results behind the records, with device, PyTorch and commit.
            setting: sentences on the setting of a measurement, after the caption.
            published: rows of other publications, set apart at the foot.
        """
        several = of_several_codes(short_commits(runs))
        of_columns = dict.fromkeys(one.note for one in self.columns if one.note)
        return Table(
            name=self.name,
            columns=[one.column for one in self.columns],
            rows=self.lines(records),
            published=published,
            caption=" ".join(filter(None, [f"{self.title}{several} Run {job.run}: {job.caption}", setting])),
            notes=[*of_columns, *self.notes, *notes, *([device_and_code(runs)] if runs else [])],
            records=records,
        )

    def lines(self, records: Iterable[Row]) -> list[list[str]]:
        """Return the cells of each line."""
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
