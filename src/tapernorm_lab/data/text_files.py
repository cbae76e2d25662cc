"""Documents from the user's own .txt, .jsonl and .parquet files, read piece by piece.

.txt      documents stand between `<|endoftext|>` marks; the one newline on either side of a mark is
          formatting and is dropped, and the file's two ends count as marks
.jsonl    one JSON object a line, the text under a named field
.parquet  one row a document, the text in a named column

A null in place of a text is an empty document. Nothing else of the text is touched. Memory holds one document and one
chunk, however long the file.
"""

import codecs
import glob
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tapernorm.util.atomic_files import parse_json
from tapernorm.util.errors import UserError, setting

SEPARATOR = "<|endoftext|>"
_CHUNK = 1 << 20  # bytes
_PARQUET_ROWS = 1024  # rows a batch
_REMEDY = "write it again, or leave it out"
_EDGE_NEWLINE = re.compile(r"\A\r?\n|\r?\n\Z")


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, in the order given, sorted within a glob, each once."""
    found: dict[Path, Path] = {}
    for pattern in patterns:
        files = _matches(pattern)
        if not files:
            remedy = "give a file, or a glob such as 'texts/*.txt'"
            raise UserError(f"{setting('data.files')}: {pattern!r} matches no file (folder {Path.cwd()}); {remedy}")
        for path in files:
            found.setdefault(path.resolve(), path)
    for path in found.values():
        if any("\ud800" <= character <= "\udfff" for character in str(path)):  # how Python shows other bytes
            raise UserError(f"{setting('data.files')}: the file name {str(path)!a} is not UTF-8; rename the file")
        if path.suffix not in _READERS:
            kinds = ", ".join(_READERS)
            raise UserError(f"{setting('data.files')}: {path} ends in {path.suffix!r}; the kinds read are {kinds}")
        if path.stat().st_size == 0:
            raise UserError(f"{setting('data.files')}: {path} is empty (0 bytes); fill it, or leave it out")
    return list(found.values())


def _matches(pattern: str) -> list[Path]:
    try:
        names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        return [path for name in names if (path := Path(name)).is_file()]
    except (OSError, ValueError):  # a name that no file can have
        return []


def documents_of(path: Path, field: str) -> Iterator[str]:
    """Documents of one file in order, empty ones included; `field` is the key or column that holds the text.

    Raises:
        UserError: the file is not UTF-8 (with the byte offset), damaged or not of the kind that its suffix says (with
            line or row), or lacks the field (with those there are).
    """
    return _READERS[path.suffix](path, field)


def _from_txt(path: Path, _field: str) -> Iterator[str]:
    for offset, raw in _pieces(path, SEPARATOR.encode()):
        yield _EDGE_NEWLINE.sub("", _utf8(path, offset, raw))


def _from_jsonl(path: Path, field: str) -> Iterator[str]:
    for number, (offset, raw) in enumerate(_pieces(path, b"\n"), start=1):
        line = _utf8(path, offset, raw)
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            at = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise UserError(f"{path}:{number}: not JSON ({at}); mend or drop the line") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: {type(row).__name__} found, and each line must be a JSON object")
        if field not in row:
            raise UserError(_no_field(f"{path}:{number}", "field", field, list(row)))
        yield text_of(row[field], f"{path}:{number}: field {field!r}")


def _from_parquet(path: Path, field: str) -> Iterator[str]:
    for row, value in enumerate(parquet_column(path, field)):
        yield text_of(value, f"{path}: row {row} of column {field!r}")


def parquet_column(path: Path, field: str) -> Iterator[Any]:
    """The values of one column of a Parquet file, row by row."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a Parquet file ({error}); {_REMEDY}") from None
    with file:
        if field not in file.schema_arrow.names:
            raise UserError(_no_field(str(path), "column", field, file.schema_arrow.names))
        row = 0
        for group in range(file.num_row_groups):
            first, rows = row, file.metadata.row_group(group).num_rows
            try:
                for batch in file.iter_batches(batch_size=_PARQUET_ROWS, row_groups=[group], columns=[field]):
                    for value in batch.column(0):
                        yield value.as_py()
                        row += 1
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}: row {row} is not UTF-8 at byte {error.start} of its text; write it as UTF-8"
                ) from None
            except (pyarrow.ArrowException, OSError) as error:
                said = f"between row {row} and row {first + rows - 1} ({error})"
                raise UserError(f"{path} is damaged {said}; {_REMEDY}") from None
            if row != first + rows:
                raise UserError(
                    f"{path} is damaged: of {rows} rows from row {first} on it has {row - first}; {_REMEDY}"
                )


_READERS = {".txt": _from_txt, ".jsonl": _from_jsonl, ".parquet": _from_parquet}


def _pieces(path: Path, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """(byte offset, bytes) of each stretch between separators; white space after the last one is no stretch."""
    offset, buffer = 0, bytearray()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            searched = max(len(buffer) - len(separator) + 1, 0)
            buffer += chunk
            start = 0
            while (end := buffer.find(separator, max(start, searched))) >= 0:
                yield offset + start, bytes(buffer[start:end])
                start = end + len(separator)
            del buffer[:start]
            offset += start
    if buffer.strip():
        yield offset, bytes(buffer)


def _utf8(path: Path, offset: int, raw: bytes) -> str:
    """`raw`, which starts at byte `offset` of the file, as text; a byte order mark at the file's start is dropped."""
    if offset == 0 and raw.startswith(codecs.BOM_UTF8):
        offset, raw = len(codecs.BOM_UTF8), raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise UserError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {at} ({error.reason}); save it as UTF-8"
        ) from None


def text_of(value: Any, where: str) -> str:
    """The document that a field or column holds: its text, or an empty one for a null."""
    if value is None:
        return ""
    if not isinstance(value, str):
        field = setting("data.field")
        raise UserError(f"{where} holds {type(value).__name__}, and text is needed; name another with {field}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"\\u{ord(value[error.start]):04x}, character {error.start}"
        raise UserError(f"{where} holds half a surrogate pair ({found}), which is no text; mend or drop it") from None
    return value


def _no_field(where: str, kind: str, field: str, there: list[str]) -> str:
    named = ", ".join(map(repr, there)) or "none"
    return f"{where}: no {kind} {field!r}; there are {named} (set {setting('data.field')})"
