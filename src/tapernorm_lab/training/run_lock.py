"""One process per run folder: a lock that the kernel releases when its holder dies, however it dies."""

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tapernorm.util.atomic_files import remove_partials
from tapernorm.util.errors import UserError

LOCK = "lock"
_held: dict[Path, IO[str]] = {}  # by this process


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` while inside; partial files of writers that were killed are cleared first.

    Raises:
        UserError: another process holds it; the message names that process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{folder} is in use by {file.read().strip() or 'another process'}: "
                "wait for it, or stop it, and run this again"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        remove_partials(folder)
        _held[folder / LOCK] = file
        try:
            yield
        finally:
            del _held[folder / LOCK]


def require_folders() -> None:
    """Raise UserError where a folder that this process has locked was deleted or moved since."""
    for path, file in _held.items():
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            raise UserError(
                f"{path.parent} was deleted or moved while this was writing into it: run the same command again, which "
                "starts anew, or from the last checkpoint where the folder is back in its place"
            )
