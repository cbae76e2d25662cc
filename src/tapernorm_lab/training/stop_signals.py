"""Stop signals: SIGTERM from a scheduler, and SIGINT from Ctrl-C.

A training finishes its micro-batch. It drops an unfinished step, which the same command repeats. Outside `until_safe`
a signal raises `Stopped` at once; inside, the code there asks `requested`. A second signal ends the process
immediately; its checkpoints are undamaged even then.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_S = 2.0  # two signals within this time count as one, because launchers forward those of terminal and scheduler


class Stopped(BaseException):
    """The process was asked to stop. It is not an `Exception`, so that handlers of errors do not catch it.

    Attributes:
        exit_code: 128 + signal, as in shells; not zero, so that a workflow engine starts the job again.
    """

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(
            f"stopped by {received.name}; all written files are complete. Run the same command again to resume; a "
            "training resumes from its last checkpoint"
        )
        self.exit_code = 128 + received


@dataclass
class _State:
    received: signal.Signals | None = None
    received_at: float = 0.0
    waiting: bool = False  # inside `until_safe`
    too_late: bool = False


_state = _State()


def requested() -> signal.Signals | None:
    """Return the signal that asked this process to stop, or None."""
    return _state.received


def too_late() -> None:
    """Ignore further signals until `stoppable` ends, because the job is almost done."""
    _state.too_late = True


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into `Stopped` inside a `with` block, and restore the previous handlers at its end."""
    global _state
    _state = _State()
    before = {number: signal.signal(number, _receive) for number in SIGNALS}
    try:
        yield
    finally:
        _state = _State()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def until_safe() -> Iterator[None]:
    """Only record a signal inside a `with` block, where the code asks `requested`; raise `Stopped` at its end."""
    _state.waiting = True
    try:
        yield
    finally:
        _state.waiting = False
    if _state.received is not None:
        raise Stopped(_state.received)


def _receive(number: int, frame: FrameType | None) -> None:
    received, now = signal.Signals(number), time.monotonic()
    if _state.too_late:
        return
    if _state.received is None:
        _state.received, _state.received_at = received, now
        if not _state.waiting:
            raise Stopped(received)
        note = f"{received.name}: stopping after this micro-batch; a second one ends it at once\n"
        os.write(2, note.encode())  # not print, which is not reentrant: the signal may have interrupted one
    elif now - _state.received_at > _SAME_S:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(received)
