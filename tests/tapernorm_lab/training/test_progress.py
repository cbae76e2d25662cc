"""Lines in a log, a bar on a terminal."""

import io
import os
import sys
import termios

import pytest

from tapernorm_lab.training import metrics as progress_module
from tapernorm_lab.training.metrics import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress_module, "time", made)
    return made


def run(clock: Clock, progress: Progress, *, start: int, total: int, step_s: float) -> None:
    for done in range(start + 1, total + 1):
        clock.now += step_s
        progress.update(done, 2.0 + 1 / done, 0.5)
    progress.close()


def test_a_log_gets_a_line_every_five_seconds_and_one_at_the_end(clock: Clock, capsys) -> None:
    run(clock, Progress("all d64 seed1", start=0, total=24), start=0, total=24, step_s=1.0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[1] for line in lines] == [f"step {k}/24" for k in (5, 10, 15, 20, 24)]
    assert lines[1] == "all d64 seed1  step 10/24  loss 2.100  gate 0.50  14 s left"
    assert lines[-1].endswith("0 s left")


def test_quick_steps_write_only_the_last_line(clock: Clock, capsys) -> None:
    run(clock, Progress("x", start=0, total=1000), start=0, total=1000, step_s=0.001)
    assert [line.split("  ")[1] for line in capsys.readouterr().err.splitlines()] == ["step 1000/1000"]


def test_the_time_left_counts_from_the_step_resumed_from(clock: Clock, capsys) -> None:
    run(clock, Progress("x", start=90, total=100), start=90, total=100, step_s=5.0)
    assert capsys.readouterr().err.splitlines()[0].endswith("step 91/100  loss 2.011  gate 0.50  45 s left")


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> str:
    """What four steps, resumed after two, write to a terminal."""
    terminal, file = os.openpty()
    termios.tcsetwinsize(file, (24, 100))
    with open(file, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        progress = Progress("all d64 seed1", start=2, total=4)
        for done in (3, 4):
            progress.update(done, 2.5, 0.25)
        progress.close()
        stderr.flush()
        seen = b""
        while b"\n" not in seen:  # a terminal hands over what it has at the moment; the last line ends with this
            seen += os.read(terminal, 100_000)
    os.close(terminal)
    return seen.decode()


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = on_a_terminal(monkeypatch)
    assert "\r" in seen
    assert "all d64 seed1: 100%" in seen
    assert "4/4" in seen
    assert "2/4" in seen  # where it was resumed
    assert "loss=2.500" in seen
    assert "gate=0.25" in seen


def test_a_terminal_without_tqdm_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core of the package installs without it."""
    monkeypatch.setattr(progress_module, "find_spec", lambda name: None)
    assert "step 4/4  loss 2.500  gate 0.25  0 s left" in on_a_terminal(monkeypatch)


def test_a_file_gets_no_control_characters(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    run(clock, Progress("x", start=0, total=3), start=0, total=3, step_s=9.0)
    assert file.getvalue().count("\n") == 3
    assert "\r" not in file.getvalue()
