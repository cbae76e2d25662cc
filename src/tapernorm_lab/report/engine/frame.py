"""A frame: the columns of a row of results, their places in the JSON of a job, and the CSV of the rows."""

import csv
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from tapernorm.util.atomic_files import whole_file
from tapernorm.util.errors import UserError

from ..read_json import stored, value_at

Row = dict[str, Any]
_TYPES = {"text": "str", "integer": "Int64", "number": "float64", "flag": "boolean"}


@dataclass(frozen=True)
class Field:
    """A column of a frame.

    Attributes:
        kind: type of the values; any but text may be missing.
        place: dotted place in the JSON of a job; empty for a derived column.
        unit: unit of a number.
        of: which document holds it, if a row is made of several.
    """

    kind: Literal["text", "integer", "number", "flag"]
    place: str = ""
    unit: str = ""
    of: str = ""


def text(place: str = "", *, of: str = "") -> Field:
    return Field("text", place, of=of)


def integer(place: str = "", unit: str = "", *, of: str = "") -> Field:
    return Field("integer", place, unit, of)


def number(place: str = "", unit: str = "", *, of: str = "") -> Field:
    return Field("number", place, unit, of)


PROVENANCE = {
    "device": text("provenance.device"),
    "config_hash": text("provenance.config_hash"),
    "commit": text("provenance.commit"),  # null outside git
    "torch": text("provenance.packages.torch"),
}


@dataclass(frozen=True)
class Frame:
    """One kind of rows.

    Attributes:
        file: name of the CSV; `{}` is the name of its table.
        key: required columns, which together identify a row.
        verb: arguments of `tapernorm` that write the file, for messages.
        fields: the declared columns. Other columns hold numbers, whose types pandas infers.
        quoted: quote text in the CSV, for columns with tokens such as line breaks.
    """

    file: str
    key: Sequence[str]
    verb: str
    fields: Mapping[str, Field]
    quoted: bool = False

    def facts(self, document: Row, path: Path, *, of: str = "") -> Row:
        """Return the columns whose values are in a document."""
        return {name: value_at(document, field.place, path) for name, field in self._placed(of)}

    def absent(self, of: str) -> Row:
        """Return the columns of a missing document, as None."""
        return {name: None for name, _ in self._placed(of)}

    def _placed(self, of: str) -> list[tuple[str, Field]]:
        return [(name, field) for name, field in self.fields.items() if field.place and field.of == of]

    def typed(self, rows: Sequence[Row] | pd.DataFrame) -> pd.DataFrame:
        """Return rows with the declared types, as `read` does; no rows give a frame of the declared columns."""
        frame = pd.DataFrame(rows)
        if frame.columns.empty:
            frame = pd.DataFrame(columns=list(self.fields))
        empty = dict.fromkeys(frame.columns[frame.isna().all()], "float64")
        declared = {name: _TYPES[field.kind] for name, field in self.fields.items() if name in frame}
        return frame.astype(empty | declared)

    def write(self, rows: pd.DataFrame, path: Path) -> None:
        """Write the rows as CSV. Each float has the shortest form that reads back as the same bits."""
        quoting = csv.QUOTE_NONNUMERIC if self.quoted else csv.QUOTE_MINIMAL
        with whole_file(path) as temporary:
            rows.to_csv(temporary, index=False, lineterminator="\n", quoting=quoting)

    def read(self, path: Path, *, run: str | None = None) -> pd.DataFrame:
        """Read the CSV that `write` wrote, compressed or not. An empty cell is a missing value.

        Raises:
            UserError: the file is missing, damaged or of another kind, or holds rows of another run.
        """
        remedy = f"write it with `tapernorm {self.verb}`"
        path = stored(path)
        if not path.is_file():
            raise UserError(f"{path} does not exist: {remedy}")
        texts = {name for name, field in self.fields.items() if field.kind == "text"}
        try:
            kinds: dict[Any, Any] = dict.fromkeys(texts, "str")
            # With quotes, an empty text differs from a missing one.
            absent: Any = {name: [""] for name in self.fields if name not in texts} if self.quoted else [""]
            frame = self.typed(pd.read_csv(path, dtype=kinds, keep_default_na=False, na_values=absent))
        except (ValueError, TypeError, EOFError, OSError, zlib.error) as error:  # no UTF-8, CSV or number
            raise UserError(f"{path} is damaged ({' '.join(str(error).split())}): {remedy}") from None
        self._require_whole(frame, path, texts, remedy)
        if run is not None and (others := set(frame["run"]) - {run}):
            raise UserError(
                f"{path} is of run {', '.join(others)}, not {run!r}: give the config of that run, or other --results"
            )
        return frame

    def _require_whole(self, frame: pd.DataFrame, path: Path, texts: Collection[str], remedy: str) -> None:
        if missing := [column for column in self.key if column not in frame]:
            raise UserError(f"{path} is damaged or of another kind, without column {', '.join(missing)}: {remedy}")
        if odd := [c for c in frame if c not in texts and not pd.api.types.is_numeric_dtype(frame[c])]:
            raise UserError(f"{path} is damaged, with text in column {', '.join(odd)}: {remedy}")
        if path.suffix == ".csv" and not path.read_bytes().endswith(b"\n"):
            raise UserError(f"{path} is damaged, as its last line is incomplete: {remedy}")


def records(frame: pd.DataFrame) -> list[Row]:
    """Return the rows of a frame as plain values, with None for missing ones."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")
