"""One process per run folder, and the folder is free again when that process is gone."""

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tapernorm.util.errors import UserError
from tapernorm_lab.training.run_lock import run_lock

HOLD = """
import sys
from pathlib import Path
from tapernorm_lab.training.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the lock of tmp_path/run."""
    arguments = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_holder_is_refused_and_told_the_first(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    named = f"{tmp_path / 'run'} is in use by process {holder.pid} on {platform.node()}:"
    for _ in range(2):  # being refused changes nothing
        with pytest.raises(UserError, match=named), run_lock(tmp_path / "run"):
            raise AssertionError("two holders")
    with run_lock(tmp_path / "another"):
        pass


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "end"])
def test_the_lock_dies_with_its_holder(tmp_path: Path, holder: subprocess.Popen[str], how) -> None:
    if how == "end":
        holder.communicate()
    else:
        holder.send_signal(how)
        holder.wait()
    with run_lock(tmp_path / "run"):
        assert (tmp_path / "run" / "lock").read_text() == f"process {os.getpid()} on {platform.node()}\n"


def test_a_program_that_the_holder_starts_does_not_inherit_the_lock(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        with run_lock(tmp_path):
            pass
    finally:
        child.communicate()
