"""Progress of a training run: a bar on a terminal, a line every few seconds in a log."""

import sys
import time
from importlib.util import find_spec
from typing import Any

_LINE_EVERY_S = 5.0


class Progress:
    """Counts optimizer steps and shows loss, gate and the time left, or keeps silent."""

    def __init__(self, label: str, *, start: int, total: int, shown: bool = True) -> None:
        self.shown = shown
        self.label, self.start, self.total = label, start, total
        self._began = self._last_line = time.monotonic()
        self._bar: Any = None
        if shown and sys.stderr.isatty() and find_spec("tqdm") is not None:  # the core installs without it
            from tqdm import tqdm

            self._bar = tqdm(desc=label, initial=start, total=total, unit="step", dynamic_ncols=True)

    def update(self, done: int, loss: float, gate: float) -> None:
        """`done` optimizer steps are finished, the last with this loss (nats/token)."""
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.3f}", gate=f"{gate:.2f}", refresh=False)
            self._bar.update(done - self._bar.n)
        elif (now := time.monotonic()) - self._last_line >= _LINE_EVERY_S or done == self.total:
            self._last_line = now
            left = (now - self._began) / (done - self.start) * (self.total - done)
            line = f"{self.label}  step {done}/{self.total}  loss {loss:.3f}  gate {gate:.2f}  {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
