"""Atomic file writes (temporary file, fsync, rename), JSON reading, and the errors of both."""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError

_REMEDY = "restore a copy, or delete it and run the job that wrote it again"


@contextmanager
def whole_file(path: Path, named: Callable[[], Path] | None = None) -> Iterator[Path]:
    """Yield a temporary sibling of `path`. On success it replaces `path`, and on an error it is removed.

    Args:
        path: the file to write.
        named: returns the final path in place of `path`, if it depends on what was written.

    Raises:
        UserError: the disk is full, or the folder cannot be written. Earlier content of `path` is intact.
    """
    temporary = path.with_name(_hidden(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path if named is None else named())
        sync_folder(path.parent)
    except BaseException as error:
        if path.parent.is_dir():
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in REASONS:
            raise unwritable(path, error) from error
        raise


REASONS = {
    errno.ENOSPC: "the disk is full: free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up: free some space and run the same command again",
    errno.EFBIG: "the file would exceed the size limit: raise it (ulimit -f) and run the same command again",
    errno.EROFS: "the file system is read-only: choose a folder that can be written",
    errno.EACCES: "permission denied: choose a folder that can be written",
    errno.EEXIST: "a file is where a folder is needed: choose another folder",
    errno.ENOTDIR: "a file is where a folder is needed: choose another folder",
    errno.ENAMETOOLONG: "a name in it is too long: shorten it",
    errno.ELOOP: "its symbolic links form a loop: give the path of the file itself",
    errno.EISDIR: "a folder is where a file is needed: choose another path",
}


def unwritable(path: Path, error: OSError) -> UserError:
    """Return the error that says why `path` cannot be written, and what to do."""
    reason = REASONS.get(error.errno or 0, error.strerror)
    return UserError(f"cannot write {path}: {reason} (no partial file is left)")


def discard(path: Path) -> None:
    """Remove a file or a folder. A folder is renamed first, so that a killed removal leaves no part under its name."""
    if path.is_dir() and not path.is_symlink():
        doomed = path.with_name(_hidden(path.name))
        os.replace(path, doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def remove_partials(folder: Path) -> None:
    """Remove the temporaries of killed writers and removals. No other process may write into `folder` meanwhile."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_partial(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def is_partial(path: Path) -> bool:
    """Return whether the name of `path` is that of a temporary of `whole_file` or `discard`."""
    return _PARTIAL.fullmatch(path.name) is not None


_PARTIAL = re.compile(r"\..+\.\d+\.partial")


def _hidden(name: str) -> str:
    """Return the name of this process's temporary for a file or folder `name`."""
    return f".{name}.{os.getpid()}.partial"


def sync_folder(folder: Path) -> None:
    """Flush the entries of `folder` to disk, so that a rename survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, in UTF-8."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` atomically, as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the object in a JSON file. A look-up of a key that it lacks raises UserError, in nested objects too.

    Raises:
        FileNotFoundError: the file is missing.
        UserError: the file is damaged.
    """
    try:
        value = parse_json(path.read_text(encoding="utf-8"), lambda pairs: _Object(pairs, path))
    except ValueError as error:
        raise UserError(f"{path} is damaged (it is not JSON: {error}): {_REMEDY}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged (it is not a JSON object): {_REMEDY}")
    return value


def parse_json(text: str, make_object: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON text.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or holds an integer of too many digits.
    """
    try:
        return json.loads(text, object_pairs_hook=make_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python's limit on the digits of an integer
        raise ValueError("it holds an integer of too many digits") from None


class _Object(dict[str, Any]):
    """An object of a JSON file, whose missing keys raise an error that names the file."""

    def __init__(self, pairs: list[tuple[str, Any]], path: Path) -> None:
        super().__init__(pairs)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise UserError(f"{self._path} has no key {key!r}: it is damaged or of another kind; run its job again")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
