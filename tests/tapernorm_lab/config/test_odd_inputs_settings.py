"""What the settings of Table S3 may be, alone and with the models that they are for."""

import json

import pytest
import yaml
from odd_models import job
from places import ROOT
from pydantic import ValidationError

from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json
from tapernorm_lab.config.jobs import BlocksJob
from tapernorm_lab.config.load import ConfigError, load_config, parse
from tapernorm_lab.config.odd_inputs import RobustnessJob
from tapernorm_lab.config.run import Config

TEST = ROOT / "config" / "test.yaml"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"lengths": [28, 20]}, "not in ascending order: sort them"),
        ({"lengths": [20, 20]}, "robustness.lengths: 20 given twice"),
        ({"lengths": []}, "robustness.lengths: at least one is needed"),
        ({"lengths": [16, 20]}, "must all exceed the training context of 16"),
        ({"repeat": 13}, r"robustness.repeat \(13\) .* 16 .*at most 12"),
        ({"repeat": 1}, "greater than or equal to 2"),
        ({"position_bin": 8}, r"position_bin \(8\) does not divide 20, 28"),
        ({"models": {"all": "All-Taper"}}, "the models all .* baseline"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(changes, complaint):
    with pytest.raises(ValidationError, match=complaint):
        job(**changes)


def test_a_text_is_not_named_as_another_trial():
    raw = job().robustness.model_dump(mode="json")
    raw["texts"][0]["name"] = "rare"
    with pytest.raises(ValidationError, match="rare given twice"):
        job(texts=raw["texts"])


def test_the_job_survives_its_json_and_puts_the_repeats_at_a_quarter():
    assert RobustnessJob.model_validate_json(canonical_json(job())) == job()
    assert job().place == 4
    assert job(repeat=12).place + 12 == 16  # the last target behind them is the row's last


def test_rows_of_a_text_have_a_token_more_than_the_context():
    odd = job().robustness
    assert odd.blocks_job(16) == BlocksJob(context=17, block_documents=None, max_rows=1000)
    assert odd.corpus_job("code").data == odd.texts[0].data


def test_a_config_tries_the_widths_that_have_a_baseline():
    config = load_config(TEST, ["seeds=[1, 2]"])
    assert config.robustness_cells() == [(24, 1), (24, 2), (16, 1), (16, 2)]
    assert list(config.robustness_job(24, 2).models) == ["baseline", "internal", "internal_aux", "all", "all_aux"]
    widths = [width.model_dump(mode="json") for width in config.widths]
    widths[1]["variants"] = ["all_aux"]
    alone = load_config(TEST, [f"widths={json.dumps(widths)}", "study=null", "robustness.stages=[]"])
    assert alone.robustness_cells() == [(16, 1), (16, 2)]


def test_a_config_whose_rows_cannot_be_made_is_refused_and_one_without_them_has_no_job():
    with pytest.raises(ConfigError, match=r"must all exceed the training context of 32"):
        load_config(TEST, ["robustness.lengths=[32, 64]"])
    config = load_config(TEST, ["robustness=null"])
    assert config.robustness_cells() == []
    with pytest.raises(UserError, match="its `robustness` is null"):
        config.robustness_job(24, 1)


def test_a_stages_arms_are_tried_on_its_seeds_and_only_beside_a_baseline():
    config = load_config(TEST)
    tried, reported = config.stage_robustness_job("S1", 2), config.odd_inputs_report_job("S1")
    assert (tried.d_model, tried.seed) == (24, 2)
    assert list(tried.models) == [arm.name for arm in config.stage("S1").arms]
    assert (reported.cells, reported.models) == (((24, 1), (24, 2)), tried.models)
    assert tried.models["diverging"] == "Baseline, an absurd learning rate"
    assert tried.models["internal_50_75"] == "Internal-Taper (+aux) (internal_50_75)"  # another arm is labelled alike
    with pytest.raises(ConfigError, match=r"robustness\.stages: no stage 'S9' in the study of this config"):
        load_config(TEST, ["robustness.stages=[S9]"])
    with pytest.raises(ConfigError, match=r"robustness\.stages: no stage 'S1' .* it has none"):
        load_config(TEST, ["study=null"])
    with pytest.raises(ConfigError, match="S1 given twice"):
        load_config(TEST, ["robustness.stages=[S1, S1]"])
    raw = yaml.safe_load(TEST.read_text(encoding="utf-8"))
    raw["study"][0]["arms"][0]["name"] = raw["study"][0]["baseline"] = "plain"
    with pytest.raises(ConfigError, match=r"robustness\.stages: stage S1 .* baseline"):
        parse(Config, raw, "here")
    raw = yaml.safe_load(TEST.read_text(encoding="utf-8"))
    raw["study"][0] |= {"search": True, "seeds": [7]}
    with pytest.raises(ConfigError, match="search: false"):
        parse(Config, raw, "here")


def test_who_else_is_tried_alters_no_job():
    alone = load_config(TEST, ["robustness.stages=[]"])
    assert alone.robustness_job(24, 1) == load_config(TEST).robustness_job(24, 1)
    assert (alone.odd_inputs_report_job(None).name, alone.odd_inputs_report_job("S1").name) == ("S3", "S3_S1")
