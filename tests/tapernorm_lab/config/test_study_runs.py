"""Equal jobs are one run: where each run of a study lies, and what is trained once."""

import re
from collections import Counter

import pytest
import yaml
from places import ROOT

from tapernorm.util.hashing import canonical_json, digest
from tapernorm_lab.config.load import load_config, parse
from tapernorm_lab.config.run import Config
from tapernorm_lab.config.study_runs import homes, stage_job, trained_arms


@pytest.fixture(scope="module")
def config():
    return load_config(ROOT / "config/test.yaml")


def changed(**arm):
    """config/test.yaml with the second arm of S1, which is the run's own Internal-Taper (+aux), changed."""
    raw = yaml.safe_load((ROOT / "config/test.yaml").read_text(encoding="utf-8"))
    raw["study"][0]["arms"][1] |= arm
    return parse(Config, raw, "here")


def test_an_arm_that_equals_a_pre_training_is_that_run(config):
    found = homes(config)
    assert found["S1", "baseline", 1] == found["S4", "baseline", 1] == "pretrain/baseline/d24/seed1"
    assert found["S1", "internal_25_100", 2] == "pretrain/internal_aux/d24/seed2"


def test_an_arm_that_equals_an_earlier_stages_is_that_run(config):
    found = homes(config)
    assert found["S1", "internal_50_75", 1] == found["S4", "internal_50_75", 1] == "study/S1/internal_50_75/seed1"
    assert found["S4", "internal_relative", 1] == "study/S4/internal_relative/seed1"  # the same but for its anchor


def test_spelling_out_the_configs_own_settings_makes_no_other_run():
    same = changed(set={"taper.end_fraction": 1.0, "train.lr": 1e-3, "steps": 40})
    assert homes(same)["S1", "internal_25_100", 2] == "pretrain/internal_aux/d24/seed2"


@pytest.mark.parametrize(
    "change",
    [
        {"set": {"train.lr": 1.0001e-3}},
        {"set": {"taper.anchor_weight": 0.2}},
        {"set": {"steps": 41}},
        {"anchor": "relative"},
        {"treatment": {"temperature": True}},
    ],
)
def test_any_difference_makes_another_run(change):
    assert homes(changed(**change))["S1", "internal_25_100", 2] == "study/S1/internal_25_100/seed2"


def test_every_run_is_trained_once(config):
    trained = {f"study/{stage.name}/{arm}/seed{seed}" for stage, arm, seed in trained_arms(config)}
    lying = set(homes(config).values())
    assert trained == {folder for folder in lying if folder.startswith("study/")}
    assert len(trained) == len(trained_arms(config)) == 6
    assert lying - trained == {f"pretrain/{v}/d24/seed{s}" for v in ("baseline", "internal_aux") for s in (1, 2)}


def test_a_stage_lists_all_its_arms_and_seeds_with_the_hash_of_the_job_that_ran(config):
    job = stage_job(config, "S4")
    assert [(run.arm, run.seed) for run in job.runs] == [
        (arm.name, seed) for arm in config.stage("S4").arms for seed in (1, 2)
    ]
    shared, own = job.runs[0], job.runs[-1]
    pretrain = config.pretrain_job("baseline", 24, 1)
    assert shared.config_hash == digest(canonical_json(pretrain))
    stage = config.stage("S4")
    assert own.config_hash == digest(canonical_json(config.arm_job(stage, stage.arm("internal_relative"), 2)))


def test_the_documented_numbers_of_runs_are_the_configs():
    cpu = load_config(ROOT / "config/cpu.yaml")
    text = (ROOT / "docs/study.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(\w+)` \|.*\| +(\d+) \|[^|]+\|$", text, flags=re.MULTILINE))
    trained = Counter(stage.name for stage, _, _ in trained_arms(cpu))
    assert documented == {name: str(n) for name, n in {"S0": len(cpu.pretrain_cells()), **trained}.items()}


def test_the_shipped_study_trains_no_run_of_the_papers_tables_again():
    cpu = load_config(ROOT / "config/cpu.yaml")
    trained = [cpu.arm_job(stage, stage.arm(arm), seed) for stage, arm, seed in trained_arms(cpu)]
    plain = [job.pretrain for job in trained if job.treatment is None]
    assert len({canonical_json(job) for job in trained}) == len(trained)
    assert not [job for job in plain if job in {cpu.pretrain_job(*cell) for cell in cpu.pretrain_cells()}]
