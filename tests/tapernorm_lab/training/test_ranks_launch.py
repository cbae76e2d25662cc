"""`tapernorm pretrain` with devices_per_job: real processes, how they end, and what is left then."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from training import HARDWARE, command, leftovers, make_job, outcome_of, write_stream

from tapernorm_lab.training.ranks import _failure
from tapernorm_lab.training.stop_signals import Stopped

TWO = HARDWARE.model_copy(update={"devices_per_job": 2, "checkpoint_every": 10})
LONG = make_job(steps=4000, log_every=1000)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stream(tmp_path_factory.mktemp("data") / "tokens")


def started(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "wb") as file:
        return subprocess.Popen([sys.executable, "-m", "tapernorm_lab.cli.main", *arguments], stdout=file, stderr=file)


@contextmanager
def running(tokens: Path, run: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[int, int]]]:
    """A long run of two ranks, past its first checkpoint; yields its launcher, and rank -> process."""
    process = started(command(LONG, tokens, run, TWO), log)
    try:
        while not list(run.glob("resume/*/step-*.pt")):
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        ranks = ranks_of(process.pid)
        assert sorted(ranks) == [0, 1]
        yield process, ranks
    finally:
        process.kill()
        process.wait()


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process, of the processes that `launcher` started."""
    found = {}
    for child in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(entry[5:]): child for entry in environment if entry.startswith(b"RANK=")}
    return found


def gone(processes: dict[int, int], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in processes.values()):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def newest(run: Path) -> int:
    """The step of the newest checkpoint."""
    return max(int(path.name[5:13]) for path in run.glob("resume/*/step-*.pt"))


@pytest.mark.slow
def test_two_processes_train_one_model_and_one_tells_of_it(tokens: Path, tmp_path: Path) -> None:
    """float32: close to one process, in all that the run publishes."""
    logs = {}
    for name, hardware in {"one": HARDWARE, "two": TWO}.items():
        logs[name] = tmp_path / f"{name}.log"
        assert started(command(make_job(), tokens, tmp_path / name, hardware), logs[name]).wait() == 0
    one, two = (outcome_of(tmp_path / name) for name in ("one", "two"))
    told = {name: log.read_text().splitlines() for name, log in logs.items()}
    assert [len([line for line in lines if str(tmp_path) in line]) for lines in told.values()] == [1, 1]
    assert told["two"][:-1] == told["one"][:-1]
    assert leftovers(tmp_path / "two") == []
    assert two["job"] == one["job"]
    assert two["values"].keys() == one["values"].keys()
    assert two["values"]["valid_ce"]["value"] == pytest.approx(one["values"]["valid_ce"]["value"], abs=1e-5)
    assert two["scale_target"] == pytest.approx(one["scale_target"], rel=1e-5)
    for norm, constants in one["norms"].items():
        assert two["norms"][norm]["c"] == pytest.approx(constants["c"], rel=1e-4)
    for row, other in zip(one["metrics"], two["metrics"], strict=True):
        assert other["loss"] == pytest.approx(row["loss"], abs=1e-4)
        assert other["logit_max"] == pytest.approx(row["logit_max"], rel=1e-3)
    hardware = json.loads((tmp_path / "two" / "result.json").read_text())["provenance"]["hardware"]
    assert hardware["devices_per_job"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job_with_a_message(tokens: Path, tmp_path: Path, rank: int) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    with running(tokens, run, log) as (process, ranks):
        os.kill(ranks[rank], signal.SIGKILL)
        assert process.wait(timeout=20) == 2
        assert gone(ranks, within_s=0)
    last = log.read_text().splitlines()[-1]
    assert last.startswith("tapernorm: the training has ended with ")
    assert f"rank {rank} SIGKILL" in last
    assert last.endswith("from the last checkpoint")
    assert not (run / "result.json").exists()
    assert newest(run) % 10 == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_all_ranks_end_after_the_same_step_which_is_kept(tokens: Path, tmp_path: Path, number) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    with running(tokens, run, log) as (process, ranks):
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number
        assert gone(ranks, within_s=0)
    said = log.read_text()
    assert said.splitlines()[-1].startswith(f"tapernorm: stopped by {number.name}")
    assert "Traceback" not in said
    assert list(run.glob("resume/*/.*")) == []


@pytest.mark.slow
def test_the_ranks_do_not_outlive_what_started_them(tokens: Path, tmp_path: Path) -> None:
    """Their launcher holds the devices; killed, it frees them, and they stop as if asked to."""
    run, log = tmp_path / "run", tmp_path / "log"
    with running(tokens, run, log) as (process, ranks):
        process.kill()
        process.wait()
        assert gone(ranks, within_s=20)
    assert "stopped by SIGTERM" in log.read_text()
    assert newest(run) > 0


@pytest.mark.slow
def test_a_second_job_on_the_folder_is_refused_by_all_its_ranks(tokens: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    with running(tokens, run, log) as (process, ranks):
        second = started(command(LONG, tokens, run, TWO), tmp_path / "second")
        assert second.wait(timeout=60) == 2
        assert process.poll() is None
    said = (tmp_path / "second").read_text()
    assert f"tapernorm: {run} is in use by process {ranks[0]} on " in said
    assert "lost the connection" not in said


@pytest.mark.slow
def test_a_resumed_job_of_two_ends_as_one_that_was_left_alone(tokens: Path, tmp_path: Path) -> None:
    job = make_job(steps=120, log_every=20)
    assert started(command(job, tokens, tmp_path / "whole", TWO), tmp_path / "log").wait() == 0
    process = started(command(job, tokens, tmp_path / "run", TWO), tmp_path / "log")
    while not list((tmp_path / "run").glob("resume/*/step-*.pt")):
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert started(command(job, tokens, tmp_path / "run", TWO), tmp_path / "log").wait() == 0
    assert outcome_of(tmp_path / "run") == outcome_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ({0: 2, 1: -9}, "rank 0 exit code 2, rank 1 SIGKILL;"),
        ({0: -15, 1: -11}, "with rank 1 SIGSEGV;"),
        ({0: 143, 3: 1}, "with rank 3 exit code 1;"),
        ({0: 143, 1: 143}, None),
        ({0: 130, 1: -2, 2: -15}, None),
    ],
)
def test_the_launcher_names_the_rank_that_was_the_cause(codes: dict[int, int], said: str | None) -> None:
    """Those that it ended itself, or that were asked to stop, are none."""
    found = _failure(codes)
    assert isinstance(found, Stopped) == (said is None)
    assert said is None or said in str(found)
