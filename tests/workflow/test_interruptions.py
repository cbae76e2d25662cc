"""What signals, kills, a second Snakemake and a full disk do to the workflow, and how the same call goes on."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from snakemake_runs import LONG, TARGET, planned, project, snakemake, train_until, trainer_pid, write_config

pytestmark = pytest.mark.slow
CORPUS = "results/test/data/corpus/manifest.json"
LOG = "results/killed/logs/pretrain/all_aux/d16/seed1.log"


@pytest.fixture
def running(tmp_path):
    """(folder, config, Snakemake, run folder) with the one training of LONG on its way."""
    folder = project(tmp_path)
    config = write_config(folder, "killed.yaml", **LONG)
    engine, run = train_until(folder, config, step=100)
    yield folder, config, engine, run
    with suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    engine.wait(timeout=60)


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


def test_sigterm_to_snakemake_lets_the_running_training_end(running):
    _, _, engine, run = running
    engine.send_signal(signal.SIGTERM)
    engine.wait(timeout=120)
    assert (run / "result.json").is_file()
    assert not (run / "resume").exists()


@pytest.mark.parametrize("how", ["SIGTERM to the training", "Ctrl-C"])
def test_a_stopped_training_fails_its_job_and_the_same_call_goes_on(running, how):
    folder, config, engine, run = running
    if how == "Ctrl-C":  # a terminal sends it to every process in front
        os.killpg(engine.pid, signal.SIGINT)
    else:
        os.kill(trainer_pid(run), signal.SIGTERM)
    assert engine.wait(timeout=120) != 0
    wait_until_gone(trainer_pid(run))
    assert "the same command goes on" in (folder / LOG).read_text()
    assert not (run / "result.json").exists()
    again = snakemake(folder, TARGET, "--configfile", config)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming after step" in (folder / LOG).read_text()


def test_a_second_snakemake_is_refused_with_the_remedy(running):
    folder, config, engine, run = running
    os.kill(trainer_pid(run), signal.SIGSTOP)  # so that it lasts as long as this test looks
    second = snakemake(folder, TARGET, "--configfile", config)
    said = second.stdout + second.stderr
    assert second.returncode != 0
    assert "Directory cannot be locked" in said
    assert "--unlock" in said
    assert engine.poll() is None


def kill_snakemake_alone(folder: Path, config: str, engine: subprocess.Popen[bytes]) -> None:
    engine.kill()
    engine.wait(timeout=60)
    assert snakemake(folder, "--unlock", "--configfile", config).returncode == 0


def test_an_orphaned_training_keeps_a_second_one_out_until_it_is_stopped(running):
    folder, config, engine, run = running
    orphan = trainer_pid(run)
    os.kill(orphan, signal.SIGSTOP)  # so that it lasts as long as this test looks
    kill_snakemake_alone(folder, config, engine)
    second = snakemake(folder, TARGET, "--configfile", config)
    assert second.returncode != 0
    assert f"is in use by process {orphan} on " in second.stdout + second.stderr
    os.kill(orphan, signal.SIGTERM)
    os.kill(orphan, signal.SIGCONT)
    wait_until_gone(orphan)
    assert snakemake(folder, TARGET, "--configfile", config).returncode == 0
    assert "resuming after step" in (folder / LOG).read_text()


def test_an_orphan_that_finished_is_kept_by_touching_its_result(running):
    folder, config, engine, run = running
    kill_snakemake_alone(folder, config, engine)
    wait_until_gone(trainer_pid(run))
    weights = (run / "model.safetensors").read_bytes()
    assert planned(snakemake(folder, "-n", TARGET, "--configfile", config)) == {"pretrain": 1}
    touched = snakemake(folder, TARGET, "--touch", "--configfile", config)
    assert touched.returncode == 0, touched.stdout + touched.stderr
    done = snakemake(folder, TARGET, "--configfile", config)
    assert "Nothing to be done" in done.stdout + done.stderr
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
        refused = snakemake(folder, "tokenizer", "--configfile", "config/test.yaml")
        assert refused.returncode != 0
        assert "Read-only file system" in refused.stdout + refused.stderr
        assert manifest.read_bytes() == before
