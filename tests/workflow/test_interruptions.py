"""What signals, kills, a second Snakemake and a full disk do to the workflow, and how the same call goes on."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from snakemake_runs import (
    LONG,
    TARGET,
    planned,
    project,
    same_numbers,
    snakemake,
    train_until,
    trainer_pid,
    write_config,
)

pytestmark = pytest.mark.slow
CORPUS = "results/test/data/corpus/manifest.json"
LOG = "results/killed/logs/pretrain/all_aux/d16/seed1.log"
CONFIG = "config/killed.yaml"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The project after the one training of LONG, which nothing disturbed."""
    folder = project(tmp_path_factory.mktemp("uninterrupted"))
    done = snakemake(folder, TARGET, "--configfile", write_config(folder, "killed.yaml", **LONG))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def running(uninterrupted, tmp_path):
    """(folder, Snakemake, run folder) with the training on its way; its text and its tokens are there already."""
    folder = shutil.copytree(uninterrupted, tmp_path / "project")
    shutil.rmtree(folder / "results/killed/pretrain")
    engine, run = train_until(folder, CONFIG, step=100)
    yield folder, engine, run
    end(engine)


def end(engine: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    engine.wait(timeout=60)


def again(folder: Path) -> subprocess.CompletedProcess[str]:
    return snakemake(folder, TARGET, "--configfile", CONFIG)


def resumes(folder: Path) -> bool:
    return "resuming after step" in (folder / LOG).read_text()


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 120
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.05)


def test_after_a_kill_the_same_call_goes_on_bitwise(running, uninterrupted):
    """Of the training alone, then of Snakemake with it, which asks for --unlock."""
    folder, engine, run = running
    os.kill(trainer_pid(run), signal.SIGKILL)
    assert engine.wait(timeout=120) != 0
    assert not (run / "result.json").exists()
    engine, _ = train_until(folder, CONFIG, step=200)
    assert resumes(folder)
    end(engine)
    refused = again(folder)
    assert refused.returncode != 0
    assert "--unlock" in refused.stdout + refused.stderr
    assert snakemake(folder, "--unlock", "--configfile", CONFIG).returncode == 0
    done = again(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert resumes(folder)
    assert same_numbers(run, uninterrupted / Path(TARGET).parent)


def test_a_stopped_training_fails_its_job_and_the_same_call_goes_on(running):
    """By SIGTERM to the training, then by Ctrl-C, which a terminal sends to every process in front."""
    folder, engine, run = running
    os.kill(trainer_pid(run), signal.SIGTERM)
    assert_stopped(folder, engine, run)
    engine, _ = train_until(folder, CONFIG, step=200)
    assert resumes(folder)
    os.killpg(engine.pid, signal.SIGINT)
    assert_stopped(folder, engine, run)
    done = again(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert resumes(folder)


def assert_stopped(folder: Path, engine: subprocess.Popen[bytes], run: Path) -> None:
    assert engine.wait(timeout=120) != 0
    wait_until_gone(trainer_pid(run))
    assert "Run the same command again to resume" in (folder / LOG).read_text()
    assert not (run / "result.json").exists()


def test_a_second_snakemake_is_refused_and_sigterm_to_the_first_lets_its_training_end(running):
    folder, engine, run = running
    trainer = trainer_pid(run)
    os.kill(trainer, signal.SIGSTOP)  # so that it lasts as long as this test looks
    second = again(folder)
    said = second.stdout + second.stderr
    assert second.returncode != 0
    assert "Directory cannot be locked" in said
    assert "--unlock" in said
    assert engine.poll() is None
    engine.send_signal(signal.SIGTERM)
    os.kill(trainer, signal.SIGCONT)
    engine.wait(timeout=120)
    assert (run / "result.json").is_file()
    assert not (run / "resume").exists()


def kill_snakemake_alone(folder: Path, engine: subprocess.Popen[bytes]) -> None:
    engine.kill()
    engine.wait(timeout=60)
    assert snakemake(folder, "--unlock", "--configfile", CONFIG).returncode == 0


def test_an_orphaned_training_keeps_a_second_one_out_until_it_is_stopped(running):
    folder, engine, run = running
    orphan = trainer_pid(run)
    os.kill(orphan, signal.SIGSTOP)  # so that it lasts as long as this test looks
    kill_snakemake_alone(folder, engine)
    second = again(folder)
    assert second.returncode != 0
    assert f"is in use by process {orphan} on " in second.stdout + second.stderr
    os.kill(orphan, signal.SIGTERM)
    os.kill(orphan, signal.SIGCONT)
    wait_until_gone(orphan)
    assert again(folder).returncode == 0
    assert resumes(folder)


def test_an_orphan_that_finished_is_kept_by_touching_its_result(running):
    folder, engine, run = running
    kill_snakemake_alone(folder, engine)
    wait_until_gone(trainer_pid(run))
    weights = (run / "model.safetensors").read_bytes()
    assert planned(snakemake(folder, "-n", TARGET, "--configfile", CONFIG)) == {"pretrain": 1}
    touched = snakemake(folder, TARGET, "--touch", "--configfile", CONFIG)
    assert touched.returncode == 0, touched.stdout + touched.stderr
    assert "Nothing to be done" in again(folder).stdout
    assert (run / "model.safetensors").read_bytes() == weights


@contextmanager
def file_system(folder: Path, options: str):
    """A small file system of its own at `folder`, for as long as a test needs it."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a file system of one's own cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def test_a_full_disk_is_said_and_the_same_call_goes_on_when_there_is_room(tmp_path):
    folder = project(tmp_path)
    with file_system(folder / "results", "size=2m"):
        full = snakemake(folder, CORPUS, "--configfile", "config/test.yaml")
        assert full.returncode != 0
        assert "the disk is full: free some space and run the same command again" in full.stdout + full.stderr
        assert not list(folder.glob("results/test/data/corpus/*.json*"))
        remount(folder / "results", "size=64m")
        again = snakemake(folder, CORPUS, "--configfile", "config/test.yaml")
        assert again.returncode == 0, again.stdout + again.stderr


def test_a_read_only_results_folder_is_said_and_what_it_holds_stays(tmp_path):
    folder = project(tmp_path)
    with file_system(folder / "results", "size=64m"):
        assert snakemake(folder, CORPUS, "--configfile", "config/test.yaml").returncode == 0
        manifest = folder / "results/test/data/corpus/manifest.json"
        before = manifest.read_bytes()
        remount(folder / "results", "ro")
        refused = snakemake(folder, "results/test/data/tokenizer/manifest.json", "--configfile", "config/test.yaml")
        assert refused.returncode != 0
        assert "Read-only file system" in refused.stdout + refused.stderr
        assert manifest.read_bytes() == before
