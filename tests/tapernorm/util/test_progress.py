"""Lines in a log, a bar on a terminal, and nothing of what is over soon."""

import io
import os
import sys
import termios

import pytest

from tapernorm.util import progress as progress_module
from tapernorm.util.progress import Progress, announced, tracked


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


def run(clock: Clock, *, start: int, total: int, step_s: float) -> None:
    progress = Progress("all d64 seed1", total, start=start)
    for done in range(start + 1, total + 1):
        clock.now += step_s
        progress.update(done, loss=f"{2 + 1 / done:.3f}")
    progress.close()


@pytest.mark.parametrize(
    ("start", "total", "step_s", "steps", "first"),
    [
        (0, 24, 1.0, (5, 10, 15, 20, 24), "all d64 seed1  step 5/24  loss 2.200  19 s left"),
        (90, 93, 5.0, (91, 92, 93), "all d64 seed1  step 91/93  loss 2.011  10 s left"),  # not from step 0 on
        (0, 2000, 0.00125, (2000,), "all d64 seed1  step 2000/2000  loss 2.001  0 s left"),
        (0, 1000, 0.00125, (), None),  # over within two seconds
    ],
)
def test_a_log_gets_a_line_every_five_seconds_and_one_at_the_end(
    clock: Clock, capsys, start, total, step_s, steps, first
) -> None:
    run(clock, start=start, total=total, step_s=step_s)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[1] for line in lines] == [f"step {step}/{total}" for step in steps]
    assert lines[:1] == ([] if first is None else [first])


def test_items_pass_through_and_are_counted(clock: Clock, capsys) -> None:
    for item in tracked("abc", "scoring", 3, unit="row"):
        assert item in "abc"
        clock.now += 4
    assert [line.split("  ")[1] for line in capsys.readouterr().err.splitlines()] == ["row 2/3", "row 3/3"]


@pytest.mark.parametrize(("quiet_s", "said"), [(0.0, "loading ...\n"), (60.0, "")])
def test_what_takes_long_is_announced(monkeypatch: pytest.MonkeyPatch, capsys, quiet_s: float, said: str) -> None:
    monkeypatch.setattr(progress_module, "_QUIET_S", quiet_s)
    with announced("loading") as timer:
        timer.join(timeout=0.1)
    assert capsys.readouterr().err == said


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, until: bytes) -> str:
    """What four steps, resumed after two, write to a terminal."""
    terminal, file = os.openpty()
    termios.tcsetwinsize(file, (24, 100))
    with open(file, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        patch.setattr(progress_module, "_QUIET_S", 0.0)
        progress = Progress("all d64 seed1", 4, start=2)
        for done in (3, 4):
            progress.update(done, loss="2.500")
        progress.close()
        stderr.flush()
        seen = b""
        while until not in seen:  # a terminal hands over what it has at the moment
            seen += os.read(terminal, 100_000)
    os.close(terminal)
    return seen.decode()


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = on_a_terminal(monkeypatch, b"\n")
    for part in ("\r", "all d64 seed1: 100%", "2/4", "4/4", "loss=2.500"):
        assert part in seen, part


def test_a_terminal_without_tqdm_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library installs without it."""
    monkeypatch.setattr(progress_module, "find_spec", lambda name: None)
    assert "step 4/4  loss 2.500  0 s left" in on_a_terminal(monkeypatch, b"\n")


def test_a_file_gets_no_control_characters(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    run(clock, start=0, total=3, step_s=9.0)
    assert file.getvalue().count("\n") == 3
    assert "\r" not in file.getvalue()
