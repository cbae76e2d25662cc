"""Documents from the user's own .txt, .jsonl and .parquet files, read piece by piece.

.txt      documents stand between `<|endoftext|>` marks; the one newline on either side of a mark is
          formatting and is dropped, and the file's two ends count as marks
.jsonl    one JSON object a line, the text under a named field
.parquet  one row a document, the text in a named column; a null is an empty document

Nothing else of the text is touched. Memory holds one document and one chunk, however long the file.
"""

import codecs
import glob
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError

SEPARATOR = "<|endoftext|>"
_CHUNK = 1 << 20  # bytes
_PARQUET_ROWS = 1024  # rows a batch
_EDGE_NEWLINE = re.compile(r"\A\r?\n|\r?\n\Z")


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, in the order given, sorted within a glob, each once.

    Raises:
        UserError: a pattern matches no file, or a file is empty or of an unknown kind.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        matches = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [path for match in matches if (path := Path(match)).is_file()]
        if not files:
            raise UserError(
                f"data.files: {pattern!r} matches no file (folder {Path.cwd()}); "
                "give a file, or a glob such as 'texts/*.txt'"
            )
        for path in files:
            found.setdefault(path.resolve(), path)
    for path in found.values():
        if path.suffix not in _READERS:
            raise UserError(f"data.files: {path} ends in {path.suffix!r}; the kinds read are {', '.join(_READERS)}")
        if path.stat().st_size == 0:
            raise UserError(f"data.files: {path} is empty (0 bytes); fill it, or leave it out")
    return list(found.values())


def documents_of(path: Path, field: str) -> Iterator[str]:
    """Documents of one file in order, empty ones included; `field` is the key or column that holds the text.

    Raises:
        UserError: the file is not UTF-8 (with the byte offset), not of the kind that its suffix
            says, or lacks the field (with those there are).
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
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}:{number}: not JSON ({error.msg} at column {error.colno}); mend or drop the line"
            ) from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: {type(row).__name__} found, and each line must be a JSON object")
        if field not in row:
            raise UserError(_no_field(f"{path}:{number}", "field", field, list(row)))
        yield _text(row[field], f"{path}:{number}: field {field!r}")


def _from_parquet(path: Path, field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a Parquet file ({error}); write it again, or leave it out") from None
    with file:
        if field not in file.schema_arrow.names:
            raise UserError(_no_field(str(path), "column", field, file.schema_arrow.names))
        row = 0
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[field]):
            for value in batch.column(0):
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path}: row {row} is not UTF-8 at byte {error.start} of its text; write it as UTF-8"
                    ) from None
                yield "" if text is None else _text(text, f"{path}: row {row} of column {field!r}")
                row += 1


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


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where} holds {type(value).__name__}, and text is needed; name another with data.field")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} holds half a surrogate pair (\\u{ord(value[error.start]):04x}, character {error.start}), "
            "which is no text; mend or drop it"
        ) from None
    return value


def _no_field(where: str, kind: str, field: str, there: list[str]) -> str:
    return f"{where}: no {kind} {field!r}; there are {', '.join(map(repr, there)) or 'none'} (set data.field)"
