"""GPU slots, by made-up device names and real processes: never two jobs on one, freed by the kernel, waits said."""

import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from training import HARDWARE, command, make_job, write_stream

from tapernorm.util.errors import UserError
from tapernorm_lab.cli import models
from tapernorm_lab.cli.main import main
from tapernorm_lab.training import gpu_slots as devices
from tapernorm_lab.training.gpu_slots import VISIBLE, device_slot, visible_devices

HOLD = """
import os, sys
from pathlib import Path
from tapernorm_lab.training import gpu_slots as devices
from tapernorm_lab.cli.main import main
from tapernorm_lab.training.run_lock import seconds_waited
devices._POLL_S = 0.02
folder, names, jobs, whole = sys.argv[1:]
devices.visible_devices, devices._lock_folder = lambda _: names.split(), lambda: Path(folder)
with devices.device_slot("cuda", int(jobs), whole=int(whole)) as name:
    print(name, os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    sys.stdin.read()
print(seconds_waited()["a GPU slot"])
"""

# Holds a slot for a moment and writes when: "device start end".
VISIT = """
import sys, time
from pathlib import Path
from tapernorm_lab.training import gpu_slots as devices
from tapernorm_lab.cli.main import main
devices._POLL_S = 0.01
if sys.argv[2] == "unlocked":
    devices.fcntl.flock = lambda *_: None
devices.visible_devices, devices._lock_folder = lambda _: ["A", "B"], lambda: Path(sys.argv[1])
with devices.device_slot("cuda") as name:
    start = time.monotonic()
    time.sleep(0.05)
    print(name, start, time.monotonic())
"""


class Jobs:
    """Processes that hold slots until they are ended."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        folder.mkdir(exist_ok=True)

    def start(self, names: str, jobs_per_gpu: int = 1, whole: int = 0) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", HOLD, str(self.folder), names, str(jobs_per_gpu), str(whole)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self.stack.enter_context(subprocess.Popen(arguments, text=True, **pipes))
        self.stack.callback(process.kill)
        return process


def device_of(job: subprocess.Popen[str]) -> str:
    """The device that a job got, once it has it; CUDA sees that one alone."""
    assert job.stdout is not None
    name, visible = job.stdout.readline().split()
    assert name == visible
    return name


def waiting(job: subprocess.Popen[str]) -> str:
    """What a job says that must wait."""
    assert job.stderr is not None
    return job.stderr.readline()


@pytest.fixture
def jobs(tmp_path):
    with ExitStack() as stack:
        yield Jobs(tmp_path / "slots", stack)


def test_jobs_spread_over_the_devices_before_they_share_one(jobs):
    first, second = (device_of(jobs.start("A B", jobs_per_gpu=2)) for _ in range(2))
    assert {first, second} == {"A", "B"}
    assert {device_of(jobs.start("A B", jobs_per_gpu=2)) for _ in range(2)} == {"A", "B"}


def test_a_job_waits_says_for_whom_and_goes_on_when_one_is_killed(jobs):
    holders = [jobs.start("A B") for _ in range(2)]
    names = [device_of(job) for job in holders]
    third = jobs.start("A B")
    said = waiting(third)
    assert said.startswith("waiting for 1 free GPU(s): ")
    for job, name in zip(holders, names, strict=True):
        assert f"{name} by process {job.pid} on " in said
    holders[1].send_signal(signal.SIGKILL)
    assert device_of(third) == names[1]
    assert float(third.communicate()[0]) > 0  # seconds waited
    assert float(holders[0].communicate()[0]) == 0


def test_a_whole_device_is_empty_of_others_and_is_not_joined(jobs):
    shared = jobs.start("A", jobs_per_gpu=2)
    assert device_of(shared) == "A"
    alone = jobs.start("A", jobs_per_gpu=2, whole=1)
    assert f"A by process {shared.pid}" in waiting(alone)
    shared.communicate()
    assert device_of(alone) == "A"
    assert f"A by process {alone.pid}" in waiting(jobs.start("A", jobs_per_gpu=2))


def test_a_job_of_several_devices_takes_all_or_none(jobs):
    """One that kept the free device while it waits would stop another such job for ever."""
    one = jobs.start("A")
    assert device_of(one) == "A"
    pair = jobs.start("A B", whole=2)
    waiting(pair)
    other = jobs.start("B")
    assert device_of(other) == "B"
    one.communicate()
    other.communicate()
    assert device_of(pair) == "A,B"


@pytest.mark.parametrize("how", ["locked", "unlocked"])
def test_twelve_jobs_are_never_two_on_a_device_and_would_be_without_the_lock(tmp_path, how):
    arguments = [sys.executable, "-c", VISIT, str(tmp_path), how]
    started = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(12)]
    words = sorted(process.communicate()[0].split() for process in started)
    made = [(name, float(start), float(end)) for name, start, end in words]
    overlaps = [(a, b) for a, b in pairwise(made) if a[0] == b[0] and b[1] < a[2]]
    assert bool(overlaps) == (how == "unlocked")
    assert how == "unlocked" or {name for name, *_ in made} == {"A", "B"}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Give this process a machine with these devices."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(devices, "_lock_folder", lambda: tmp_path)
    return lambda *names: monkeypatch.setattr(devices, "visible_devices", lambda _: list(names))


def test_cuda_sees_the_device_inside_and_what_was_before_outside(machine, monkeypatch):
    machine("A")
    with device_slot("auto") as name:
        assert (name, os.environ[VISIBLE]) == ("A", "A")
    assert VISIBLE not in os.environ
    monkeypatch.setenv(VISIBLE, "7")
    with pytest.raises(ZeroDivisionError), device_slot("auto"):
        raise ZeroDivisionError
    assert os.environ[VISIBLE] == "7"
    with device_slot("auto") as name:
        assert name == "A"


@pytest.mark.parametrize(("device", "names"), [("cpu", ["A"]), ("auto", []), ("cuda", [])])
def test_without_a_gpu_nothing_happens(machine, tmp_path, device, names):
    machine(*names)
    with device_slot(device) as name:
        assert name is None
        assert VISIBLE not in os.environ
    assert list(tmp_path.iterdir()) == []


def test_one_rank_of_several_uses_what_its_parent_holds(machine, monkeypatch):
    machine("A")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with device_slot("cuda", whole=1) as name:
        assert name is None


def test_more_devices_than_there_are_is_an_error(machine):
    machine("A", "B")
    said = r"devices_per_job is 3, but this process may use 2 \(A, B\)"
    with pytest.raises(UserError, match=said), device_slot("cuda", whole=3):
        pass


def test_it_is_refused_once_cuda_has_started(machine, monkeypatch):
    machine("A")
    started = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", started)
    with pytest.raises(AssertionError, match="CUDA has started"), device_slot("cuda"):
        pass


def test_the_slots_of_another_user_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(devices.os, "getuid", lambda: os.stat(tmp_path).st_uid + 54321)
    folder = Path(f"/tmp/tapernorm-gpu-slots-{os.getuid()}")
    try:
        with pytest.raises(UserError, match="belongs to another user"):
            devices._lock_folder()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        folder.rmdir()


def fake_driver(folder: Path, uuids: list[str]) -> None:
    """An `nvidia-smi` that lists these GPUs."""
    program = folder / "nvidia-smi"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("#!/bin/sh\n" + "".join(f"echo {uuid}\n" for uuid in uuids))
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (None, ["GPU-a", "GPU-b", "GPU-c"]),
        ("2,0", ["GPU-c", "GPU-a"]),  # a scheduler's indices
        ("GPU-b", ["GPU-b"]),
        ("MIG-x, GPU-c", ["MIG-x", "GPU-c"]),
        ("", []),
        ("NoDevFiles", []),  # SLURM, for a job without a GPU
        ("1,-1,2", ["GPU-b"]),  # CUDA reads up to the first that it does not know
    ],
)
def test_what_a_scheduler_set_is_respected(tmp_path, monkeypatch, given, seen):
    fake_driver(tmp_path, ["GPU-a", "GPU-b", "GPU-c"])
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert visible_devices({} if given is None else {VISIBLE: given}) == seen


def test_without_a_driver_indices_stay_indices(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_devices({}) == []
    assert visible_devices({VISIBLE: "0,3"}) == ["0", "3"]


def test_a_training_waits_for_the_device_that_another_process_holds(tmp_path, jobs):
    """The whole way from the command line: a made-up driver, and the folder where every job of this user looks."""
    name = f"GPU-test-{os.getpid()}-{time.monotonic_ns()}"
    fake_driver(tmp_path / "bin", [name])
    jobs.folder = devices._lock_folder()
    holder = jobs.start(name)
    assert device_of(holder) == name
    hardware = HARDWARE.model_copy(update={"device": "auto"})
    arguments = command(make_job(), write_stream(tmp_path / "tokens"), tmp_path / "run", hardware)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environment.pop(VISIBLE, None)
    program = [sys.executable, "-m", "tapernorm_lab.cli.main", *arguments]
    try:
        with subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True) as trainer:
            assert trainer.stderr is not None
            assert f"{name} by process {holder.pid}" in trainer.stderr.readline()
            assert not (tmp_path / "run").exists()
            holder.communicate()
            trainer.communicate()
        assert trainer.returncode == 0
        assert (tmp_path / "run/result.json").exists()
    finally:
        (devices._lock_folder() / f"{name}.slot0").unlink()


@pytest.mark.parametrize("verb", [["fold", "--out", "O"], ["evaluate", "--tokens", "T"]])
def test_scoring_and_folding_take_any_of_the_slots_that_trainings_share(monkeypatch, verb):
    """Counting one slot per GPU they would wait for the trainings in the first, others being free."""
    asked = []

    def slot(*arguments, whole=0):
        asked.append((*arguments, whole))
        raise UserError("far enough")

    monkeypatch.setattr(models, "device_slot", slot)
    assert main([*verb, "--model", "M", "--device", "cuda", "--jobs-per-gpu", "4"]) == 2
    assert asked == [("cuda", 4, 0)]
