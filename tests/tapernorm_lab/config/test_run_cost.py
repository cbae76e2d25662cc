"""What a plan adds up to, by hand; that it gives the paper's own hours; and that it needs neither torch nor time."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT

from tapernorm.util.errors import UserError
from tapernorm_lab.cli.main import main
from tapernorm_lab.config.device_speeds import EAGER, ENGINE_S, measured_speeds
from tapernorm_lab.config.job_cost import Throughput
from tapernorm_lab.config.load import load_config
from tapernorm_lab.config.run_cost import (
    Item,
    Plan,
    expected_seconds,
    plan_of,
)
from tapernorm_lab.training import gpu_slots as devices

PAPER = ROOT / "config/paper.yaml"


@pytest.fixture(scope="module")
def config():
    return load_config(PAPER)


def items(made):
    return {item.rule: item for item in made.items}


def test_every_training_job_of_the_config_is_counted_with_its_tokens(config):
    found = items(plan_of(config))
    steps = {64: 100_000, 128: 100_000, 256: 200_000, 512: 300_000}
    for d, n in steps.items():
        jobs = 6 * (5 if d == 512 else 3)
        assert (found[f"pretrain d{d}"].jobs, found[f"pretrain d{d}"].tokens) == (jobs, jobs * n * 16 * 512)
        assert found[f"fold d{d}"].jobs == jobs - 6
    assert found["finetune xl"].jobs == 4
    assert found["finetune xl"].tokens == 4 * 800 * 504 * 1024
    assert found["evaluate xl"].jobs == 4 + 1 + 2  # fine-tunes, the original, published weights
    assert sum(item.jobs for rule, item in found.items() if rule.startswith("pretrain")) == len(config.pretrain_cells())


def test_a_study_counts_the_runs_that_no_other_job_makes():
    small = load_config(ROOT / "config/test.yaml")
    found = items(plan_of(small))
    assert {rule: item.jobs for rule, item in found.items() if rule.startswith("arm")} == {"arm S1": 4, "arm S4": 2}
    assert found["arm S1"].tokens == 4 * 40 * 8 * 32
    assert found["arm S1"].flops == 2 * found["arm S4"].flops > 0
    faster = items(plan_of(small, measured={24: 2.0 * 40 * 8 * 32}))
    assert faster["arm S4"].seconds == 1.0
    assert faster["arm S4"].measured


@pytest.mark.parametrize("name", ["demo", "paper"])
def test_as_many_jobs_are_planned_as_snakemake_plans(name):
    path = f"config/{name}.yaml"
    command = [Path(sys.executable).with_name("snakemake"), "-n", "--forceall", "--nolock", "tables", "figures"]
    done = subprocess.run([*command, "--configfile", path], cwd=ROOT, capture_output=True, text=True, check=True)
    stats = re.findall(r"^(\w+) +(\d+)$", done.stdout + done.stderr, flags=re.MULTILINE)
    jobs = {rule: int(count) for rule, count in stats if rule not in ("total", "tables", "figures")}
    ours = Counter[str]()
    for item in plan_of(load_config(ROOT / path)).items:
        ours[item.rule.split()[0]] += item.jobs
    assert ours.total() == sum(jobs.values())
    for rule in ("pretrain", "fold", "finetune", "finetune_fold", "base", "bench", "figure", "corpus", "tokens"):
        assert ours[rule] == jobs[rule]


def test_flops_are_six_per_matrix_entry_and_attention_over_the_context(config):
    d, layers, d_ff, vocabulary, context = 512, 8, 1368, 10_000, 512
    matrices = layers * (4 * d * d + 3 * d * d_ff) + vocabulary * d
    per_token = 6 * matrices + 12 * layers * d * context
    item = items(plan_of(config))["pretrain d512"]
    assert item.flops == pytest.approx(item.tokens * per_token)


def test_the_counted_speed_gives_the_papers_own_hours(config):
    made = plan_of(config)
    for d, hours in {64: 4.3, 128: 4.8, 256: 8.2, 512: 15.4}.items():
        item = items(made)[f"pretrain d{d}"]
        assert item.published_h == pytest.approx(hours * item.jobs)
        assert made.item_hours(item, compiled=False, shared=1) == pytest.approx(item.published_h, rel=0.12)


def made_plan(*some, gpus=1, **hardware):
    config = load_config(PAPER)
    changed = config.hardware.model_copy(update={"compile": False, "jobs_per_gpu": 1, **hardware})
    return Plan(items=some, hardware=changed, on_gpu=True, precision="bf16", gpus=gpus, speeds=EAGER)


TRAINING = Item("pretrain", 8, seconds=7200.0, arithmetic_s=1800.0, shares=True, disk_bytes=10.0, checkpoint_bytes=3.0)


def test_overheads_of_jobs_that_share_a_gpu_overlap_and_their_arithmetic_does_not():
    assert made_plan().item_hours(TRAINING) == 2.0
    assert made_plan(jobs_per_gpu=2).item_hours(TRAINING) == 1.0
    assert made_plan(jobs_per_gpu=8).item_hours(TRAINING) == 0.5  # the arithmetic alone fills the device
    assert made_plan(compile=True).item_hours(TRAINING) == (0.5 * 5400 + 1800) / 3600
    alone = Item("finetune", 8, seconds=7200.0, arithmetic_s=1800.0)
    assert made_plan(jobs_per_gpu=8).item_hours(alone) == 2.0
    single = Item("pretrain", 1, seconds=7200.0, arithmetic_s=1800.0, shares=True)
    assert made_plan(jobs_per_gpu=8).item_hours(single) == 2.0  # nobody to share with
    assert made_plan().item_hours(TRAINING, slowed=4) == (5400 + 4 * 1800) / 3600


def test_measured_runs_keep_the_speed_that_they_had(config):
    speed = 1e5
    item = items(plan_of(config, measured={512: speed}))["pretrain d512"]
    made = plan_of(config, measured={512: speed})
    assert made.item_hours(item) == pytest.approx(item.tokens / speed / 3600 / config.hardware.jobs_per_gpu)
    assert made.item_hours(item, compiled=False) == made.item_hours(item)


def test_the_peak_on_disk_is_what_stays_and_the_checkpoints_of_jobs_that_run_at_once():
    evaluation = Item("evaluate", 3, disk_bytes=5.0)
    tuned = Item("finetune", 4, disk_bytes=20.0, checkpoint_bytes=10.0)
    assert made_plan(TRAINING, evaluation).kept_bytes == 15
    assert made_plan(TRAINING, evaluation).peak_bytes == 15 + 3
    assert made_plan(TRAINING, evaluation, jobs_per_gpu=4).peak_bytes == 15 + 4 * 3
    assert made_plan(TRAINING, tuned, jobs_per_gpu=4).peak_bytes == 30 + 12
    assert made_plan(TRAINING, tuned, jobs_per_gpu=2).peak_bytes == 30 + 10
    assert made_plan(tuned, gpus=3).peak_bytes == 20 + 3 * 10
    assert made_plan(tuned, gpus=8).peak_bytes == 20 + 4 * 10  # there are no more jobs
    pairs = replace(tuned, devices=2)
    assert [made_plan(pairs, gpus=gpus).peak_bytes for gpus in (1, 2, 5, 16)] == [30, 30, 40, 60]


def test_a_checkpoint_holds_weights_and_two_moments_and_three_exist_at_once(config):
    per_parameter = 4 * 3 * 3
    item = items(plan_of(config))["finetune small"]
    parameters = 12 * 12 * 768**2 + (12 * 13 + 2) * 768 + (50_257 + 1024) * 768
    assert parameters == 124_439_808
    assert item.checkpoint_bytes == pytest.approx(per_parameter * parameters, rel=2e-3)  # All-TaperLN has more gains


def test_more_cores_shorten_what_runs_side_by_side_alone(config):
    demo = load_config(ROOT / "config/demo.yaml")
    one, two, four = (expected_seconds(demo, cores) for cores in (1, 2, 4))
    assert one - two == pytest.approx(2 * (two - four))
    assert two - four < (two - ENGINE_S) / 2  # the benchmark has all cores to itself
    assert expected_seconds(load_config(ROOT / "config/test.yaml"), 2) < two / 2


def test_speeds_given_on_the_command_line_replace_ours(config):
    given = EAGER.given(step_s=0.01, flops_per_s=1e14)
    assert given.decoder == given.gpt2 == Throughput(0.01, 1e14)
    assert EAGER.given() == EAGER
    faster, ours = plan_of(config, speeds=given), plan_of(config)
    hours = [made.item_hours(items(made)["pretrain d64"], compiled=False, shared=1) for made in (faster, ours)]
    assert hours[0] < hours[1] / 10


def test_measured_speeds_are_medians_of_finished_runs(tmp_path):
    (tmp_path / "results.csv").write_text("d_model,tokens_per_s\n64,1.0\n64,5.0\n64,2.0\n128,7.5\n")
    assert measured_speeds(tmp_path / "results.csv") == {64: 2.0, 128: 7.5}
    with pytest.raises(UserError, match="tapernorm rows"):
        measured_speeds(tmp_path / "absent.csv")
    for content in (b"a,b\n1,2\n", b"d_model,tokens_per_s\n64,fast\n", b"d_model,tokens_per_s\n64", bytes(range(256))):
        (tmp_path / "damaged.csv").write_bytes(content)
        with pytest.raises(UserError, match=r"damaged.csv is no results.csv"):
            measured_speeds(tmp_path / "damaged.csv")


def test_the_verb_prints_every_rule_the_published_hours_and_each_defaults_saving(capsys):
    assert main(["plan", "--config", str(PAPER), "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    for rule in ("corpus", "pretrain d512", "fold d64", "bench", "finetune xl", "evaluate small", "table", "figure"):
        assert any(line.startswith(rule) for line in text.splitlines())
    assert "on 8 GPU(s)" in text
    assert "Published: 773 h" in text
    for default in ("compile: ", "jobs_per_gpu 4: ", "bf16: "):
        assert any(line.startswith(default) for line in text.splitlines())
    assert "cannot run it" not in text
    assert main(["plan", "--config", str(PAPER), "--gpus", "2"]) == 0
    assert "A job of finetune xl takes 4 GPUs of one machine: 2 cannot run it." in capsys.readouterr().out


def test_a_config_for_any_device_is_planned_for_the_gpus_that_are_here(capsys, monkeypatch):
    demo = ["plan", "--config", str(ROOT / "config/demo.yaml")]
    for gpus, options, said in [
        (0, [], "Expected on 2 CPU cores: "),
        (3, [], "on 3 GPU(s)"),
        (0, ["--gpus", "2"], "on 2 GPU(s)"),
        (3, ["--set", "hardware.device=cpu"], "Expected on 2 CPU cores: "),
    ]:
        monkeypatch.setattr(devices, "visible_devices", lambda environment, n=gpus: ["GPU-x"] * n)
        assert main([*demo, *options]) == 0
        assert said in capsys.readouterr().out


def test_planning_imports_neither_torch_nor_pandas():
    code = (
        "import sys; from tapernorm_lab.cli.main import main\n"
        f"main(['plan', '--config', {str(PAPER)!r}])\n"
        "print({'torch', 'pandas', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"
