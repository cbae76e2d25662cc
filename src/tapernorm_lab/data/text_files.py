"""Documents from the user's own .txt, .jsonl and .parquet files, read piece by piece.

.txt      documents are separated by `<|endoftext|>` marks; one newline on either side of a mark is dropped, and the
          start and end of the file count as marks
.jsonl    one JSON object per line, with the text under a named field
.parquet  one document per row, with the text in a named column

A null in place of a text is an empty document. Text is not changed otherwise. Memory holds one document and one chunk,
whatever the size of the file.
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
_PARQUET_ROWS = 1024  # rows per batch
_REMEDY = "write it again, or leave it out"
_EDGE_NEWLINE = re.compile(r"\A\r?\n|\r?\n\Z")


def find_files(patterns: Sequence[str]) -> list[Path]:
    """List the files of paths and globs, in the order given, sorted within a glob, each once.

    Raises:
        UserError: a pattern matches no file, or a file is empty, of an unknown kind, or has a name that is not UTF-8.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        files = _matches(pattern)
        if not files:
            remedy = "give a file, or a glob such as 'texts/*.txt'"
            raise UserError(f"{setting('data.files')}: {pattern!r} matches no file (folder {Path.cwd()}); {remedy}")
        for path in files:
            found.setdefault(path.resolve(), path)
    for path in found.values():
        if any("\ud800" <= character <= "\udfff" for character in str(path)):  # bytes that are not UTF-8
            raise UserError(f"{setting('data.files')}: the file name {str(path)!a} is not UTF-8; rename the file")
        if path.suffix not in _READERS:
            kinds = ", ".join(_READERS)
            raise UserError(
                f"{setting('data.files')}: {path} ends in {path.suffix!r}; give a file that ends in {kinds}"
            )
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
    """Yield the documents of one file in order, including empty ones; `field` is the key or column of the text.

    Raises:
        UserError: the file is not UTF-8, is damaged, is not of the kind of its suffix, or lacks the field. The message
            gives the byte offset, the line or row, or the fields that exist.
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
            raise UserError(f"{path}:{number}: not JSON ({at}); correct or delete the line") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: {type(row).__name__} found, but each line must be a JSON object")
        if field not in row:
            raise UserError(_no_field(f"{path}:{number}", "field", field, list(row)))
        yield text_of(row[field], f"{path}:{number}: field {field!r}")


def _from_parquet(path: Path, field: str) -> Iterator[str]:
    for row, value in enumerate(parquet_column(path, field)):
        yield text_of(value, f"{path}: row {row} of column {field!r}")


def parquet_column(path: Path, field: str) -> Iterator[Any]:
    """Yield the values of one column of a Parquet file, row by row.

    Raises:
        UserError: the file is not Parquet, is damaged, is not UTF-8, or lacks the column.
    """
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
                    f"{path} is damaged: it has {row - first} of {rows} rows from row {first} on; {_REMEDY}"
                )


_READERS = {".txt": _from_txt, ".jsonl": _from_jsonl, ".parquet": _from_parquet}


def _pieces(path: Path, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, bytes) of each piece between separators; a blank piece after the last one is dropped."""
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
    """Decode `raw`, which starts at byte `offset` of the file; drop a byte order mark at the file's start."""
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
    """Return the document in a field or column: its text, or an empty text for a null.

    Raises:
        UserError: the value is of another type, or holds half a surrogate pair.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        field = setting("data.field")
        raise UserError(f"{where} holds {type(value).__name__}, but text is needed; choose another with {field}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"\\u{ord(value[error.start]):04x}, character {error.start}"
        raise UserError(
            f"{where} holds half a surrogate pair ({found}), which is no text; correct or delete it"
        ) from None
    return value


def _no_field(where: str, kind: str, field: str, there: list[str]) -> str:
    named = ", ".join(map(repr, there)) or "none"
    return f"{where}: no {kind} {field!r}; there are {named} (set {setting('data.field')})"
