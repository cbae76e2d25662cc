"""A table as data: its columns, each with the formatter of its cells, which records share a line, and fixed notes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..provenance import device_and_code, of_several_codes, short_commits
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
        note: what the column means; printed beneath a table that shows it.
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
    """What tells of a run: its name, and a sentence for each table."""

    @property
    def run(self) -> str: ...
    @property
    def caption(self) -> str: ...


@dataclass(frozen=True)
class TableSpec:
    """What a table shows of its records.

    Attributes:
        name: file stem.
        title: the sentence that its caption begins with.
        columns: in their order.
        notes: fixed sentences, after those of the columns.
        line: columns in which the records of a line agree; without any, each record has a line.
        member: the column that tells the records of a line apart.
        order: columns by which records are ordered in print, their values in the order in which they first stand.
        printed: whether a record is printed; the CSV holds all.
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
        """The table of these records.

        Args:
            job: of the run, whose name and sentence the caption ends with.
            notes: what only these records tell.
            runs: the results behind the records, with their device, PyTorch and commit.
            setting: what was measured on, behind the caption.
            published: rows of others' numbers, set apart at the foot.
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
