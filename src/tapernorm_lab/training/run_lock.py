"""A lock for one process per run folder, which the kernel releases when its holder dies, and the time spent waiting."""

import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tapernorm.util.atomic_files import remove_partials
from tapernorm.util.errors import UserError

LOCK = "lock"
_held: dict[Path, IO[str]] = {}  # lock files that this process holds
_waited_s = {"a lock": 0.0, "a GPU slot": 0.0}


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` inside a `with` block; first remove partial files of killed writers.

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
                "wait for it or stop it, then run the command again"
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
    """Raise UserError if a folder that this process has locked was deleted or moved since."""
    for path, file in _held.items():
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            raise UserError(
                f"{path.parent} was deleted or moved during the run. Run the same command again: it resumes from the "
                "last checkpoint if the folder is back in its place, and starts from step 0 otherwise"
            )


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Count the time inside as waiting for `what`, "a lock" or "a GPU slot"."""
    began = time.monotonic()
    try:
        yield
    finally:
        _waited_s[what] += time.monotonic() - began


def seconds_waited() -> dict[str, float]:
    """Seconds that this process has waited, by what for.

    "a core": the main thread could run, and no core was free for it. The entry is missing where the kernel does not
    count this (only Linux does).
    """
    schedule = Path("/proc/self/schedstat")  # ns on a core, ns runnable without one, and how often it was given one
    core = {"a core": int(schedule.read_text(encoding="ascii").split()[1]) / 1e9} if schedule.is_file() else {}
    return core | _waited_s
