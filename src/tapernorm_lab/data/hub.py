"""Data sets of the hub or of local Parquet files, through `datasets`; a script of a data set is never run."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tapernorm.util.atomic_files import sha256_of
from tapernorm.util.errors import UserError

from .text_files import find_files, parquet_column, text_of


@contextmanager
def reaching(name: str, remedy: str) -> Iterator[None]:
    """Say what to do where the hub cannot be reached or has no such data set.

    Raises:
        UserError: in place of what `datasets` raises.
    """
    from datasets.exceptions import DatasetsError

    try:
        yield
    except UserError:
        raise
    except (OSError, DatasetsError, ValueError) as error:
        raise UserError(f"cannot load {name} ({error}). Without a network, {remedy}") from error


def parquet_files(patterns: Sequence[str]) -> list[Path]:
    """The Parquet files that paths, globs and folders name, in the order given, sorted within a glob or folder.

    Raises:
        UserError: a pattern matches no file, or a file is empty or no Parquet file by its name.
    """
    files = find_files([str(Path(p) / "**" / "*.parquet") if Path(p).is_dir() else p for p in patterns])
    for path in files:
        if path.suffix != ".parquet":
            raise UserError(f"{path} is not a .parquet file, and only those stand in for a data set of the hub")
    return files


def local_rows(files: Sequence[Path], field: str, *, streaming: bool = False) -> Any:
    """The rows of Parquet files as one data set, in the order given.

    Args:
        field: the column that will be read.

    Raises:
        UserError: a file is no Parquet file, or they do not go together.
    """
    import datasets

    names = [str(file) for file in files]
    with reading(files, field):
        return datasets.load_dataset("parquet", data_files=names, split="train", streaming=streaming)


@contextmanager
def reading(files: Sequence[Path], field: str) -> Iterator[None]:
    """Name the Parquet file that cannot be read, and its row.

    Raises:
        UserError: in place of what `datasets` and `pyarrow` raise.
    """
    import pyarrow
    from datasets.exceptions import DatasetsError

    try:
        yield
    except UserError:
        raise
    except (pyarrow.ArrowException, DatasetsError, OSError, UnicodeDecodeError) as error:
        for file in files:
            deque(parquet_column(file, field), maxlen=0)  # raises at the damage
        names = ", ".join(map(str, files))
        raise UserError(
            f"{names} cannot be read as Parquet ({error}); write them again, or leave the broken one out"
        ) from error


def described(files: Sequence[Path]) -> dict[str, Any]:
    """What a manifest says of local files."""
    return {"files": [{"path": str(f), "bytes": f.stat().st_size, "sha256": sha256_of(f)} for f in files]}


def column(rows: Any, name: str, size: int) -> Iterator[list[Any]]:
    """The values of one column in order, `size` at a time; `rows` is a data set, in memory or streamed.

    Raises:
        UserError: there is no such column.
    """
    for batch in rows.iter(batch_size=size):
        if name not in batch:
            raise UserError(f"no column {name!r}; there are {', '.join(map(repr, batch))}")
        yield batch[name]


def texts(rows: Any, name: str, size: int) -> Iterator[str]:
    """The documents in one column, in order; a null is an empty one.

    Raises:
        UserError: there is no such column, or a row holds no text.
    """
    row = 0
    for values in column(rows, name, size):
        for value in values:
            yield text_of(value, f"row {row} of column {name!r}")
            row += 1
