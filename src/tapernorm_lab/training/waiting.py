"""How long this process has waited, and for what: a CPU core, a lock on a folder, a GPU slot."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_waited_s = {"a lock": 0.0, "a GPU slot": 0.0}


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
