"""Whole runs of Snakemake in a copy of the project."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from forks import FORK
from places import ROOT

SNAKEMAKE = Path(sys.executable).with_name("snakemake")
ABSENT = object()  # for a setting that is left out


def snakemake(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["--cores", "2", *arguments]
    with TemporaryDirectory() as place:
        said = Path(place) / "said"
        run = FORK.Process(target=_run_forked, args=(folder, command, said))
        run.start()
        run.join(timeout=1200)
        if run.exitcode is None:
            run.kill()
            raise subprocess.TimeoutExpired(command, 1200, said.read_bytes())
        return subprocess.CompletedProcess(command, run.exitcode, said.read_text(), "")


def _run_forked(folder: Path, arguments: list[str], said: Path) -> None:
    """What the command `snakemake` does, in `folder`; all of its output goes into the file `said`."""
    from snakemake.cli import main

    os.chdir(folder)
    with open(said, "wb") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = [str(SNAKEMAKE), *arguments]
    main()


def project(folder: Path) -> Path:
    """A copy of what Snakemake needs; the package itself is the installed one."""
    for name in ("Snakefile", "environment.yml"):
        shutil.copy(ROOT / name, folder)
    for name in ("workflow", "config", "profiles"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


def write_config(folder: Path, name: str, **changes: object) -> str:
    """config/test.yaml with `section__key=value` changes, under another file name."""
    config = yaml.safe_load((folder / "config/test.yaml").read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
        if value is ABSENT:
            del node[last]
    (folder / "config" / name).write_text(yaml.safe_dump(config))
    return f"config/{name}"


def planned(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Jobs per rule of a dry run."""
    assert done.returncode == 0, done.stdout
    stats = re.findall(r"^(\w+) +(\d+)$", done.stdout, flags=re.MULTILINE)
    return {rule: int(count) for rule, count in stats if rule != "total"}


def resources_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """Output file -> what its job asks for, of every job of a dry run."""
    found = {}
    for job in re.split(r"^\[.*\]$", done.stdout, flags=re.MULTILINE)[1:]:
        lines = dict(re.findall(r"^    (output|resources): (.*)$", job, flags=re.MULTILINE))
        asked = dict(re.findall(r"(\w+)=([^,{]+)", lines.get("resources", "")))
        found |= dict.fromkeys(lines.get("output", "").split(", "), asked)
    return found


# One training job, long enough to be caught in the middle.
LONG = {
    "run": "killed",
    "seeds": [1],
    "widths": [{"d_model": 16, "d_ff": 40, "label": "d16", "steps": 400, "variants": ["all_aux"]}],
    "study": None,
    "robustness": None,
}


TARGET = "results/killed/pretrain/all_aux/d16/seed1/result.json"


def train_until(folder: Path, config: str, step: int) -> tuple[subprocess.Popen[bytes], Path]:
    """Start Snakemake and return once its training job has logged `step`."""
    command = [str(SNAKEMAKE), "--cores", "1", TARGET, "--configfile", config]
    engine = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    run = folder / Path(TARGET).parent
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and engine.poll() is None:
        lines = [line for path in run.glob("resume/*/metrics.jsonl") for line in path.read_text().splitlines()]
        if len(lines) > 1 and json.loads(lines[-2])["step"] >= step:
            return engine, run
        time.sleep(0.02)
    raise AssertionError(f"step {step} was never reached; Snakemake's status: {engine.poll()}")


def trainer_pid(run: Path) -> int:
    match = re.search(r"process (\d+)", (run / "lock").read_text())
    assert match is not None
    return int(match[1])


def same_numbers(run: Path, other: Path) -> bool:
    """Equal weights, bitwise, and equal metrics, their times apart."""

    def metrics(folder: Path) -> list[dict[str, object]]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if k not in ("tokens_per_s", "elapsed_s")} for row in rows]

    weights = [(folder / "model.safetensors").read_bytes() for folder in (run, other)]
    return weights[0] == weights[1] and metrics(run) == metrics(other)
