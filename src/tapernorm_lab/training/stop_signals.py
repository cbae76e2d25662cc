"""Asked to stop (SIGTERM from a scheduler, SIGINT from Ctrl-C), a training finishes its micro-batch.

A step with more micro-batches to come is dropped, and the same command does it again. Outside `until_safe` such a
signal raises `Stopped` at once; inside, it waits until the code there looks at `requested`. A second signal ends the
process where it stands, for those who cannot wait; its checkpoints are whole all the same.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_S = 2.0  # launchers forward what the terminal or scheduler sends as well: so close together, two signals are one


class Stopped(BaseException):
    """The process was asked to stop; not an error, and handlers of errors must not swallow it.

    Attributes:
        exit_code: 128 + signal, as shells say it: not zero, so a workflow engine starts the job again.
    """

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(
            f"stopped by {received.name}, nothing half-written is left: the same command goes on, training from its "
            "last checkpoint"
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
    """The signal that asked this process to stop, if any."""
    return _state.received


def too_late() -> None:
    """Ignore further signals until `stoppable` ends: the work is done, what is left of it takes a moment."""
    _state.too_late = True


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into `Stopped` while inside; the handlers of before come back at the end."""
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
    """Inside, a signal is only noted: the code there asks `requested`. Its end raises `Stopped` where one was."""
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
        os.write(2, note.encode())  # print is not for signal handlers: one that it interrupts may be printing
    elif now - _state.received_at > _SAME_S:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(received)
