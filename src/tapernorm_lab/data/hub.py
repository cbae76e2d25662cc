"""Read data sets from the hub or from local Parquet files with `datasets`. Scripts of a data set are never run."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from tapernorm.util.atomic_files import sha256_of
from tapernorm.util.errors import UserError

from .text_files import find_files, parquet_column, text_of

_ROWS = 1000  # rows per batch


@dataclass(frozen=True)
class Rows:
    """The rows of a data set, in order."""

    rows: Any  # a Dataset or IterableDataset of `datasets`
    details: dict[str, Any]  # origin of the rows, for a manifest
    reading: Callable[[], AbstractContextManager[None]]  # context manager that turns read errors into UserError

    @classmethod
    def of_hub(cls, name: str, *, split: str, revision: str | None, remedy: str, streaming: bool = False) -> Self:
        """Open a split of a data set of the hub. With `streaming`, rows are downloaded as they are read.

        Raises:
            UserError: the data set cannot be loaded; the message ends with `remedy`.
        """
        import datasets

        reading = partial(_reaching, name, remedy)
        with reading():
            rows = datasets.load_dataset(name, split=split, revision=revision, streaming=streaming)
        return cls(rows, {"hub": name, "revision": revision, "split": split}, reading)

    @classmethod
    def of_files(cls, files: Sequence[Path], field: str, *, streaming: bool = False) -> Self:
        """Open Parquet files, in the order given, to read their column `field`.

        Raises:
            UserError: a file is not Parquet, is damaged or has no such column.
        """
        import datasets

        names = [str(file) for file in files]
        reading = partial(_reading_parquet, files, field)
        with reading():
            rows = datasets.load_dataset("parquet", data_files=names, split="train", streaming=streaming)
        return cls(rows, {"files": described(files)}, reading)

    def column(self, name: str, size: int = _ROWS) -> Iterator[Any]:
        """Yield the values of one column in order, reading `size` rows at a time."""
        with self.reading():
            for batch in self.rows.iter(batch_size=size):
                if name not in batch:
                    raise UserError(f"no column {name!r}; there are {', '.join(map(repr, batch))}")
                yield from batch[name]

    def texts(self, name: str) -> Iterator[str]:
        """Yield the documents in one column in order; a null is an empty document."""
        for row, value in enumerate(self.column(name)):
            yield text_of(value, f"row {row} of column {name!r}")


def parquet_files(patterns: Sequence[str]) -> list[Path]:
    """List the Parquet files of paths, globs and folders, in the order given, sorted within a glob or folder."""
    files = find_files([str(Path(p) / "**" / "*.parquet") if Path(p).is_dir() else p for p in patterns])
    for path in files:
        if path.suffix != ".parquet":
            raise UserError(f"{path} is not a .parquet file: only Parquet files can replace a data set of the hub")
    return files


def described(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a manifest's entries on local files."""
    return [{"path": str(f), "bytes": f.stat().st_size, "sha256": sha256_of(f)} for f in files]


@contextmanager
def _reaching(name: str, remedy: str) -> Iterator[None]:
    from datasets.exceptions import DatasetsError

    try:
        yield
    except UserError:
        raise
    except (OSError, DatasetsError, ValueError) as error:
        raise UserError(f"cannot load {name} ({error}). Without a network, {remedy}") from error


@contextmanager
def _reading_parquet(files: Sequence[Path], field: str) -> Iterator[None]:
    """Turn errors of `datasets` and `pyarrow` into a UserError that names the damaged file and row."""
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
            f"{names} cannot be read as Parquet ({error}); write them again, or leave out the damaged one"
        ) from error
