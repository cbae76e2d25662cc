"""The workflow through a real SLURM, by profiles/slurm as it is: every rule, and a training cancelled on its way."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import one_node_slurm
import pytest
import yaml
from snakemake_runs import SNAKEMAKE, project, same_numbers, snakemake

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
OBSTACLE = one_node_slurm.obstacle()
LONG = "pretrain/internal_aux/d24/seed1"  # the training that is cancelled
STEPS = 2000
PROFILE = ("--workflow-profile", "profiles/slurm", "--slurm-status-command", "squeue")
# The first question after as long as a job takes here; each that finds none finished puts off the next by ten seconds.
HURRY = ("--slurm-init-seconds-before-status-checks", "6")


def small_config(folder: Path) -> str:
    """config/test.yaml on the CPU, every rule of it with fewer jobs each; one training is long enough to be caught."""
    config = yaml.safe_load((folder / "config/test.yaml").read_text())
    config["seeds"] = [1]
    config["gpt2"] |= {"sizes": config["gpt2"]["sizes"][:1], "methods": ["vanilla", "all_aux"]}
    config["widths"] = [
        {"d_model": 16, "d_ff": 40, "label": "14K", "steps": 40, "variants": ["baseline", "internal_aux"]},
        {"d_model": 24, "d_ff": 64, "label": "26K", "steps": STEPS, "variants": ["internal_aux"]},
    ]
    config["train"]["eval_every"] = 0
    config["hardware"] |= {"device": "cpu", "checkpoint_every": 10 * STEPS}  # no checkpoint but that of a signal
    path = folder / "config/a lab's.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path.relative_to(folder))


def steps_logged(run: Path) -> int:
    lines = [line for path in run.glob("resume/*/metrics.jsonl") for line in path.read_text().splitlines()]
    return json.loads(lines[-2])["step"] if len(lines) > 1 else 0


def cancel_when_on_its_way(run: Path, engine: subprocess.Popen[bytes]) -> int:
    """`scancel` the long training once it has logged steps; the steps that it had logged."""
    deadline = time.monotonic() + 600
    while (done := steps_logged(run)) < 20:
        assert engine.poll() is None, "Snakemake ended before the long training was on its way"
        assert time.monotonic() < deadline, "the long training never began"
        time.sleep(0.02)
    listed = subprocess.run(["squeue", "--noheader", "--format=%i %k"], capture_output=True, text=True, check=True)
    (job,) = re.findall(r"^(\d+) rule_pretrain_wildcards_internal_aux_24_1$", listed.stdout, flags=re.MULTILINE)
    subprocess.run(["scancel", job], check=True)
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, config, Snakemake's words): every table and figure through SLURM, the long training cancelled once."""
    if OBSTACLE:
        pytest.skip(OBSTACLE)
    folder = project(tmp_path_factory.mktemp("lab"))
    config = small_config(folder)
    command = [SNAKEMAKE, "tables", "figures", *PROFILE, *HURRY, "--configfile", config]
    with one_node_slurm.cluster(tmp_path_factory.mktemp("slurm")), open(folder / "said", "wb") as said:
        with subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT) as engine:
            try:
                cancel_when_on_its_way(folder / "results/test" / LONG, engine)
                engine.wait(timeout=1200)
            finally:
                engine.terminate()
        assert engine.returncode == 0, (folder / "said").read_text()[-5000:]
        assert one_node_slurm.jobs() == []
    return folder, config, (folder / "said").read_text()


def test_the_whole_dag_runs_through_slurm_and_reports_run_where_snakemake_does(finished):
    folder, config, said = finished
    submitted = set(re.findall(r"slurm_logs/rule_(\w+)/", said))
    data = {"corpus", "tokenizer", "tokens", "scored_tokens", "filter"}
    models = {"pretrain", "fold", "bench", "base", "finetune", "finetune_fold", "evaluate", "evaluate_base"}
    assert submitted == data | models | {"int8_rows"}
    here = set(re.findall(r"^localrule (\w+):", said, flags=re.MULTILINE))
    assert {"rows_training", "rows_gpt2", "table", "figure", "tables", "figures"} <= here
    assert (folder / "results/test/tables/table3.md").is_file()
    assert (folder / "figures/test/figure_decode.pdf").is_file()
    again = snakemake(folder, "tables", "figures", "--configfile", config)
    assert "Nothing to be done" in again.stdout + again.stderr


def test_a_cancelled_training_is_submitted_again_and_goes_on_bitwise(finished, tmp_path):
    folder, config, said = finished
    run = folder / "results/test" / LONG
    assert len(re.findall(r"slurm_logs/rule_pretrain/internal_aux_24_1/\d+\.log", said)) >= 2
    log = (folder / "results/test/logs" / f"{LONG}.log").read_text()
    resumed = re.search(rf"resuming after step (\d+) of {STEPS}", log)
    assert resumed is not None, log
    assert 20 <= int(resumed[1]) < STEPS
    options = ["--variant", "internal_aux", "--width", "24", "--seed", "1", "--tokens", "results/test/data/tokens"]
    command = [sys.executable, "-m", "tapernorm_lab.cli.main", "pretrain", "--config", config, *options]
    subprocess.run([*command, "--out", tmp_path / "undisturbed"], cwd=folder, check=True, capture_output=True)
    assert same_numbers(run, tmp_path / "undisturbed")


def test_nothing_that_was_started_is_left(finished):
    assert not one_node_slurm.CONFIGURATION.exists()
    listed = subprocess.run(["ps", "-eo", "stat=,comm="], capture_output=True, text=True, check=True).stdout
    alive = {name for status, name in (line.split(None, 1) for line in listed.splitlines()) if status[0] != "Z"}
    assert alive.isdisjoint({"slurmctld", "slurmd", "slurmstepd", "munged"})
    assert not one_node_slurm.munge_folder().exists()


def test_a_machines_own_slurm_is_left_alone(tmp_path, monkeypatch):
    own = tmp_path / "slurm.conf"
    own.write_text("ClusterName=real\n")
    monkeypatch.setattr(one_node_slurm, "CONFIGURATION", own)
    monkeypatch.setattr(one_node_slurm.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(one_node_slurm.os, "geteuid", lambda: 0)
    assert one_node_slurm.obstacle() == f"{own} is this machine's own"
    own.unlink()
    assert one_node_slurm.obstacle() is None
