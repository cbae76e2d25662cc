"""What a run's costs add up to, by hand; hours from a known speed alone; and that planning imports no torch."""

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
from tapernorm_lab.config.load import load_config
from tapernorm_lab.config.run_cost import RuleCost, Speed, measured_tokens_per_s, run_costs

PAPER = ROOT / "config/paper.yaml"
HOUR = 3600


@pytest.fixture(scope="module")
def costs():
    return by_rule(load_config(PAPER))


def by_rule(config) -> dict[str, RuleCost]:
    return {cost.rule: cost for cost in run_costs(config)}


def test_every_training_job_of_the_config_is_counted_with_its_tokens(costs):
    steps = {64: 100_000, 128: 100_000, 256: 200_000, 512: 300_000}
    for d, n in steps.items():
        jobs = 6 * (5 if d == 512 else 3)
        assert (costs[f"pretrain d{d}"].jobs, costs[f"pretrain d{d}"].tokens) == (jobs, jobs * n * 16 * 512)
        assert costs[f"fold d{d}"].jobs == jobs - 6
    assert costs["finetune xl"].jobs == 4
    assert costs["finetune xl"].tokens == 4 * 800 * 504 * 1024
    assert costs["evaluate xl"].jobs == 4 + 1 + 2  # fine-tunes, the original, published weights


def test_a_study_counts_the_runs_that_no_other_job_makes():
    found = by_rule(load_config(ROOT / "config/test.yaml"))
    assert {rule: cost.jobs for rule, cost in found.items() if rule.startswith("arm")} == {"arm S1": 4, "arm S4": 2}
    assert found["arm S1"].tokens == 4 * 40 * 8 * 32
    assert found["arm S1"].flops == 2 * found["arm S4"].flops > 0


def test_as_many_jobs_are_planned_as_snakemake_plans():
    path = "config/paper.yaml"
    command = [Path(sys.executable).with_name("snakemake"), "-n", "--forceall", "--nolock", "tables", "figures"]
    done = subprocess.run([*command, "--configfile", path], cwd=ROOT, capture_output=True, text=True, check=True)
    stats = re.findall(r"^(\w+) +(\d+)$", done.stdout + done.stderr, flags=re.MULTILINE)
    jobs = Counter({rule: int(count) for rule, count in stats})
    ours = Counter[str]()
    for cost in run_costs(load_config(ROOT / path)):
        ours[cost.rule.split()[0]] += cost.jobs
    for rule, others in {"evaluate": ["evaluate_base"], "tokens": ["scored_tokens", "filter"]}.items():
        jobs[rule] += sum(jobs[other] for other in others)
    for rule, of_gpt2 in {"corpus": "gpt2_corpus", "tokenizer": "gpt2_tokenizer", "tokens": "blocks"}.items():
        ours[rule] += ours.pop(of_gpt2, 0)
    assert ours == {rule: jobs[rule] for rule in ours}


def test_flops_are_six_per_matrix_entry_and_attention_over_the_context(costs):
    d, layers, d_ff, vocabulary, context = 512, 8, 1368, 10_000, 512
    matrices = layers * (4 * d * d + 3 * d * d_ff) + vocabulary * d
    per_token = 6 * matrices + 12 * layers * d * context
    cost = costs["pretrain d512"]
    assert cost.flops == pytest.approx(cost.tokens * per_token)


def test_the_papers_own_hours_are_those_of_as_many_runs(costs):
    for d, hours in {64: 4.3, 128: 4.8, 256: 8.2, 512: 15.4}.items():
        cost = costs[f"pretrain d{d}"]
        assert cost.published_h == pytest.approx(hours * cost.jobs)


def test_a_checkpoint_holds_weights_and_two_moments_and_three_exist_at_once(costs):
    per_parameter = 4 * 3 * 3
    parameters = 12 * 12 * 768**2 + (12 * 13 + 2) * 768 + (50_257 + 1024) * 768
    assert parameters == 124_439_808
    found = costs["finetune small"].checkpoint_bytes
    assert found == pytest.approx(per_parameter * parameters, rel=2e-3)  # All-TaperLN has more gains


def test_hours_come_from_a_known_speed_alone_and_what_finished_runs_had_goes_first():
    training = RuleCost("pretrain d64", 2, tokens=HOUR * 100.0, flops=HOUR * 1e6, d_model=64)
    assert Speed().hours(training) is None
    assert Speed(flops_per_s=5e5).hours(training) == 2.0
    assert Speed(flops_per_s=5e5, tokens_per_s={64: 10.0}).hours(training) == 10.0
    assert Speed(flops_per_s=5e5, tokens_per_s={128: 10.0}).hours(training) == 2.0
    assert Speed(tokens_per_s={64: 10.0}).hours(replace(training, d_model=None)) is None
    assert Speed(flops_per_s=5e5).hours(RuleCost("corpus", 1)) is None


def test_measured_speeds_are_medians_of_finished_runs(tmp_path):
    (tmp_path / "results.csv").write_text("d_model,tokens_per_s\n64,1.0\n64,5.0\n64,2.0\n128,7.5\n")
    assert measured_tokens_per_s(tmp_path / "results.csv") == {64: 2.0, 128: 7.5}
    with pytest.raises(UserError, match="tapernorm rows"):
        measured_tokens_per_s(tmp_path / "absent.csv")
    for content in (b"a,b\n1,2\n", b"d_model,tokens_per_s\n64,fast\n", b"d_model,tokens_per_s\n64", bytes(range(256))):
        (tmp_path / "damaged.csv").write_bytes(content)
        with pytest.raises(UserError, match=r"damaged.csv .* results.csv"):
            measured_tokens_per_s(tmp_path / "damaged.csv")


def test_the_verb_prints_every_rule_and_hours_where_a_speed_is_given(tmp_path, capsys, costs):
    def said(*options: str) -> list[str]:
        assert main(["plan", "--config", str(PAPER), *options]) == 0
        return capsys.readouterr().out.splitlines()

    plain, given = said(), said("--flops-per-s", "1e13")
    for rule in costs:
        assert any(line.startswith(rule) for line in plain)
    assert any(line.startswith("Published: 773 h") for line in plain)
    total = sum(cost.flops for cost in costs.values()) / 1e13 / HOUR
    assert any(line.startswith(f"Hours: {total:.3g}") for line in given)
    assert not any(line.startswith("Hours: ") for line in plain)
    (tmp_path / "results.csv").write_text("d_model,tokens_per_s\n64,1e5\n")
    measured = costs["pretrain d64"].tokens / 1e5 / HOUR
    assert any(line.startswith(f"Hours: {measured:.3g}") for line in said("--rows", str(tmp_path)))


def test_planning_imports_neither_torch_nor_pandas():
    code = (
        "import sys; from tapernorm_lab.cli.main import main\n"
        f"main(['plan', '--config', {str(PAPER)!r}])\n"
        "print({'torch', 'pandas', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"
