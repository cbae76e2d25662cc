"""Progress on stderr of tasks above two seconds: a bar on a terminal, a line every few seconds in a log."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")

_QUIET_S = 2.0  # a shorter task shows no progress
_LINE_EVERY_S = 5.0  # between two lines of a log


class Progress:
    """Counter of a task's units, which shows how many are done and the time left.

    Args:
        label: name of the task.
        total: number of units.
        start: number of units that were done before.
        unit: noun for one unit.
        shown: whether to show anything.
    """

    def __init__(self, label: str, total: int, *, start: int = 0, unit: str = "step", shown: bool = True) -> None:
        self._label, self._total, self._start, self._unit, self._shown = label, total, start, unit, shown
        self._began = time.monotonic()
        self._next_line = self._began + _LINE_EVERY_S
        self._bar: Any = None
        if shown and sys.stderr.isatty() and find_spec("tqdm") is not None:  # tqdm is optional for the library
            from tqdm import tqdm

            layout: dict[str, Any] = {"dynamic_ncols": True, "delay": _QUIET_S}
            self._bar = tqdm(desc=label, initial=start, total=total, unit=unit, **layout)

    def update(self, done: int, **values: str) -> None:
        """Show that `done` units are finished, including those of `start`, and `values` under their names."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.set_postfix(values, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        now = time.monotonic()
        if now >= self._next_line or (done == self._total and now - self._began >= _QUIET_S):
            self._next_line = now + _LINE_EVERY_S
            left = (now - self._began) / (done - self._start) * (self._total - done)
            told = "".join(f"{name} {value}  " for name, value in values.items())
            line = f"{self._label}  {self._unit} {done}/{self._total}  {told}{left:.0f} s left"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the bar. It stays on the terminal."""
        if self._bar is not None:
            self._bar.close()


def tracked(items: Iterable[T], label: str, total: int, *, unit: str = "batch", shown: bool = True) -> Iterator[T]:
    """Yield the `total` items of `items` and show the progress."""
    progress = Progress(label, total, unit=unit, shown=shown)
    try:
        for done, item in enumerate(items, start=1):
            yield item
            progress.update(done)
    finally:
        progress.close()


@contextmanager
def announced(what: str) -> Iterator[threading.Timer]:
    """Print `what` if the code inside takes longer than two seconds."""
    timer = threading.Timer(_QUIET_S, print, args=(f"{what} ...",), kwargs={"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()
