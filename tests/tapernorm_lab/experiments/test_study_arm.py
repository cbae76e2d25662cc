"""A run of an arm: the paper's run where nothing is treated, resumed like it, and a result even where it diverges."""

import pytest
from places import ROOT
from training import HARDWARE, STEPS, checkpointing, make_job, outcome_of, write_stream

import tapernorm_lab.experiments.study_arm
from tapernorm.util.atomic_files import read_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json, digest
from tapernorm_lab.cli.main import main
from tapernorm_lab.config.load import load_config
from tapernorm_lab.config.study import ArmJob, Treatment
from tapernorm_lab.experiments.pretrain import pretrain
from tapernorm_lab.experiments.study_arm import run_arm
from tapernorm_lab.training.run_lock import run_lock
from tapernorm_lab.training.trainer import Trainer

NUMBERS = ("metrics", "weights", "config", "values", "norms", "scale_target")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_stream(tmp_path_factory.mktemp("data") / "tokens")


def plain(variant="all_aux", **changes):
    return ArmJob(pretrain=make_job(variant, **changes), treatment=None)


def command(job, tokens, out):
    settings = ["--job", canonical_json(job), "--hardware", canonical_json(HARDWARE)]
    return ["pretrain", *settings, "--tokens", str(tokens), "--out", str(out)]


@pytest.mark.parametrize("variant", ["baseline", "internal", "all_aux"])
def test_an_untreated_arm_computes_what_the_pre_training_of_its_job_does(tokens, tmp_path, variant):
    """So a pre-training may stand for the arm that equals it. Control: another setting computes something else."""
    pretrain(make_job(variant), tokens, tmp_path / "pretrain", HARDWARE)
    run_arm(plain(variant), tokens, tmp_path / "arm", HARDWARE)
    run_arm(plain(variant, clip_norm=0.9), tokens, tmp_path / "other", HARDWARE)
    trained, arm, other = (outcome_of(tmp_path / name) for name in ("pretrain", "arm", "other"))
    assert {key: arm[key] for key in NUMBERS} == {key: trained[key] for key in NUMBERS}
    assert other["weights"] != trained["weights"]


def test_the_result_says_whose_it_is(tokens, tmp_path):
    job = plain("all_relative")
    returned = run_arm(job, tokens, tmp_path, HARDWARE)
    result = read_json(tmp_path / "result.json")
    assert result == returned
    assert (result["kind"], "diverged" in result) == ("arm", False)
    assert ArmJob.model_validate(result["job"]) == job
    assert result["provenance"]["config_hash"] == digest(canonical_json(job))
    start = {name: entry["value"] for name, entry in result["taper_start"].items()}
    assert start["taper_start_jump"] == start["taper_start_ce_linear"] - start["taper_start_ce_norms"] != 0


def test_an_arm_that_was_interrupted_goes_on_bitwise(tokens, tmp_path, monkeypatch):
    job = ArmJob(pretrain=make_job("all_relative"), treatment=Treatment(calibration="vector"))
    run_arm(job, tokens, tmp_path / "whole", HARDWARE)
    original, taken = Trainer.step, []

    def interrupted(self, k):
        if k == 9 and 9 not in taken:
            taken.append(9)
            raise KeyboardInterrupt
        taken.append(k)
        return original(self, k)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_arm(job, tokens, tmp_path / "cut", checkpointing(4))
    run_arm(job, tokens, tmp_path / "cut", checkpointing(4))
    assert taken == [*range(9), 9, *range(8, STEPS)]
    details = ("norms", "scale_target", "taper_start")
    assert outcome_of(tmp_path / "cut", details) == outcome_of(tmp_path / "whole", details)


def test_a_run_that_diverges_is_a_result_and_no_failure(tokens, tmp_path, capsys):
    wild = plain(lr=1e30)
    assert main(command(wild, tokens, tmp_path)) == 0
    result = read_json(tmp_path / "result.json")
    (marker,) = tmp_path.glob("resume/*/diverged.json")
    step, what = result["diverged"]["step"], result["diverged"]["what"]
    assert (step, what) == (read_json(marker)["step"], read_json(marker)["tensor"])
    assert 1 <= step < STEPS
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"diverged at step {step}: {what} is not finite"
    assert f"{what} is not finite at step {step};" in said.err
    assert (result["kind"], result["values"]) == ("arm", {})
    assert result["provenance"]["config_hash"] == digest(canonical_json(wild))


def test_a_divergence_is_not_computed_twice_and_leaves_nothing_of_an_earlier_job(tokens, tmp_path, monkeypatch):
    assert main(command(plain(), tokens, tmp_path)) == 0
    assert (tmp_path / "model.safetensors").exists()
    assert main([*command(plain(lr=1e30), tokens, tmp_path), "--overwrite"]) == 0
    first = read_json(tmp_path / "result.json")
    assert not [name for name in ("model.safetensors", "config.json", "metrics.jsonl") if (tmp_path / name).exists()]
    (tmp_path / "result.json").unlink()  # as a workflow engine does before each start
    monkeypatch.setattr(Trainer, "step", lambda self, k: pytest.fail("a known divergence was computed again"))
    assert main(command(plain(lr=1e30), tokens, tmp_path)) == 0
    again = read_json(tmp_path / "result.json")
    assert again["diverged"] == first["diverged"]
    monkeypatch.undo()
    assert main([*command(plain(), tokens, tmp_path), "--overwrite"]) == 0
    assert read_json(tmp_path / "result.json")["values"]["valid_ce"]["value"] > 0


def test_other_errors_are_errors(tokens, tmp_path):
    with pytest.raises(UserError, match="vocabulary"):
        run_arm(plain(vocab_size=60), tokens, tmp_path, HARDWARE)
    with run_lock(tmp_path), pytest.raises(UserError, match="is in use by"):
        run_arm(plain(), tokens, tmp_path, HARDWARE)
    assert not (tmp_path / "result.json").exists()


def test_a_config_names_the_job_by_stage_arm_and_seed(tmp_path, monkeypatch, capsys):
    config = load_config(ROOT / "config/test.yaml")
    stage, asked = config.stage("S4"), []

    def recorded(job, tokens, out, hardware, *, overwrite):
        asked.append(job)
        return {"diverged": {"step": 3, "what": "it"}}

    monkeypatch.setattr(tapernorm_lab.experiments.study_arm, "run_arm", recorded)
    folders = ["--tokens", str(tmp_path), "--out", str(tmp_path)]
    named = ["pretrain", "--config", str(ROOT / "config/test.yaml"), "--stage", "S4", "--arm", "internal_relative"]
    assert main([*named, "--seed", "2", *folders]) == 0
    assert asked == [config.arm_job(stage, stage.arm("internal_relative"), 2)]
    assert str(asked[0].pretrain.variant) == "internal_relative"
    capsys.readouterr()
    assert main([*named, *folders]) == 2
    assert "--config needs --seed" in capsys.readouterr().err
