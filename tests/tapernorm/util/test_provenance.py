"""Where a number comes from is written down truly."""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

import tapernorm
from tapernorm.util import provenance as provenance_module
from tapernorm.util.provenance import code_commit, provenance


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout whose src/tapernorm/util/provenance.py is the module that asks."""
    module = tmp_path / "src/tapernorm/util/provenance.py"
    for path in (module, tmp_path / "src/tapernorm/norms.py", tmp_path / "src/tapernorm_lab/training/trainer.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# one\n")
    (tmp_path / "README").write_text("outside the package\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    monkeypatch.setattr(provenance_module, "__file__", str(module))
    return tmp_path


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, "-C", folder, *words], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "edited", ["tapernorm/util/provenance.py", "tapernorm/norms.py", "tapernorm_lab/training/trainer.py"]
)
def test_the_commit_is_that_of_the_checkout(checkout, edited):
    head = git(checkout, "rev-parse", "HEAD").strip()
    assert code_commit() == head
    (checkout / "README").write_text("edited, but no code\n")
    (checkout / "src" / "notes.txt").write_text("not tracked\n")
    assert code_commit() == head
    (checkout / "src" / edited).write_text("# two\n")
    assert code_commit() == head + "+dirty"


def test_a_package_installed_inside_somebody_elses_checkout_has_no_commit(checkout, monkeypatch):
    installed = checkout / ".venv" / "provenance.py"
    installed.parent.mkdir()
    installed.write_text("# installed\n")
    monkeypatch.setattr(provenance_module, "__file__", str(installed))
    assert code_commit() is None


def test_without_git_there_is_no_commit(checkout, monkeypatch):
    shutil.rmtree(checkout / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.parent))
    assert code_commit() is None
    monkeypatch.setenv("PATH", "/nonexistent")
    assert code_commit() is None


def test_versions_time_and_the_callers_own_facts():
    before = datetime.now(UTC).replace(microsecond=0)
    found = provenance(seed=7, device="cpu")
    assert found["tapernorm"] == tapernorm.__version__
    assert found["packages"]["torch"] == version("torch")
    assert (found["seed"], found["device"]) == (7, "cpu")
    assert before <= datetime.fromisoformat(found["written_at"]) <= datetime.now(UTC)


def test_the_host_is_a_hash_that_tells_machines_apart_and_names_none(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17.example.org")
    found = provenance()["host"]
    assert found == hashlib.sha256(b"node-17.example.org").hexdigest()[:12]
    monkeypatch.setattr(socket, "gethostname", lambda: "node-18.example.org")
    assert provenance()["host"] != found


def test_the_wall_time_is_that_of_the_process(monkeypatch):
    monkeypatch.setattr(provenance_module, "_LOADED", 100.0)
    monkeypatch.setattr(provenance_module.time, "monotonic", lambda: 142.5)
    assert provenance()["wall_time_s"] == 42.5


def test_a_package_that_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setattr(provenance_module, "_PACKAGES", ("torch", "no-such-package-at-all"))
    assert list(provenance()["packages"]) == ["torch"]


def test_the_kernels_that_decide_the_last_digits_are_named():
    code = "import os, torch; from tapernorm.util.provenance import provenance; print(provenance()['kernels'])"
    for forced, told in {"default": "DEFAULT", "avx2": "AVX2"}.items():
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": forced}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == told
    bare = "from tapernorm.util.provenance import provenance; print('kernels' in provenance())"
    done = subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"  # nothing computed by torch where it is not loaded
