"""Arms and treatments: what they may change, what identifies them, and that what picks a setting does not report it."""

import itertools
from typing import get_args

import pytest
import yaml
from places import ROOT
from training import make_arm, make_job

from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json, digest
from tapernorm_lab.config.load import ConfigError, load_config, parse
from tapernorm_lab.config.run import Config
from tapernorm_lab.config.study import (
    ArmJob,
    NormReplacement,
    Stage,
    Treatment,
    changed,
)
from tapernorm_lab.config.variants import Anchor, TaperedNorms, Variant

CPU, TEST = ROOT / "config/cpu.yaml", ROOT / "config/test.yaml"
DYT = NormReplacement(kind="dyt", alpha_init=0.5, attention_alpha_init=0.7, embedding_scale=True)


def study_of(**changes):
    """The complaint about config/test.yaml with its first stage changed; empty where there is none."""
    raw = yaml.safe_load(TEST.read_text(encoding="utf-8"))
    raw["study"][0] |= changes
    raw["robustness"]["stages"] = []  # no other fault than the stage's own
    try:
        parse(Config, raw, "here")
    except ConfigError as error:
        return str(error)
    return ""


def test_an_arm_changes_what_it_sets_and_nothing_else():
    plain = make_job("all_aux")
    arm = make_arm("all_aux", name="later", label="Later", set={"taper.start_fraction": 0.5, "train.lr": 3e-3})
    expected = make_job("all_aux", start_fraction=0.5, lr=3e-3)
    assert arm.job(plain) == ArmJob(pretrain=expected, treatment=None)
    assert expected != plain
    assert arm.job(plain).pretrain.model == plain.model
    assert changed(plain, {"steps": 40}).steps == 40
    assert changed(plain, {}) == plain


@pytest.mark.parametrize("name", ["train.lrr", "seed", "model.d_model", "train", "variant", "taper", "train.precision"])
def test_an_arm_sets_numbers_of_its_training_alone(name):
    with pytest.raises(ValueError, match=f"cannot set {name}; it has steps, train.batch, train.lr"):
        changed(make_job("all_aux"), {name: 1})


def test_a_baseline_has_no_taper_to_set():
    with pytest.raises(ValueError, match=r"variant baseline cannot set taper.start_fraction; it has steps"):
        changed(make_job("baseline"), {"taper.start_fraction": 0.5})


def test_an_impossible_setting_is_refused_with_its_stage_and_arm():
    arms = [{"name": "baseline", "label": "B", "taper": "none", "anchor": "none"}]
    late = {"name": "late", "label": "L", "taper": "all", "anchor": "absolute", "set": {"taper.start_fraction": 1.5}}
    assert "stage S1, arm late: 1 validation error" in study_of(arms=[*arms, late])
    assert "taper.start_fraction" in study_of(arms=[*arms, late])
    late["set"] = {"taper.start_fraction": 0.5}
    assert study_of(arms=[*arms, late]) == ""


def test_a_treatment_changes_something():
    with pytest.raises(ValueError, match="changes nothing"):
        Treatment()
    with pytest.raises(ValueError, match="changes nothing"):
        Treatment(calibration="scalar", temperature=False)
    assert Treatment(temperature=True).temperature


def test_what_a_treatment_leaves_as_it_is_is_no_part_of_its_identity():
    """A field that a later version adds must not part an arm from its runs."""
    assert canonical_json(Treatment(calibration="vector")) == '{"calibration":"vector"}'
    assert canonical_json(Treatment(norm=DYT)) == canonical_json({"norm": DYT.model_dump()})
    assert canonical_json(DYT) == (
        '{"alpha_init":0.5,"attention_alpha_init":0.7,"embedding_scale":true,"kind":"dyt"}'  # no final gain in it
    )
    gained = NormReplacement.model_validate({**DYT.model_dump(), "final_gain_init": 8})
    assert canonical_json(gained) != canonical_json(DYT)
    for treatment in (Treatment(temperature=True, calibration="vector"), Treatment(norm=gained)):
        assert Treatment.model_validate(treatment.model_dump()) == treatment


NAMES = {Variant(taper, anchor).name for taper in get_args(TaperedNorms) for anchor in get_args(Anchor)}
FITS = {
    "norm": (Treatment(norm=DYT), {"baseline"}),
    "temperature": (Treatment(temperature=True), NAMES),
    "embedding_scale": (Treatment(embedding_scale=True), NAMES),
    "calibration": (Treatment(calibration="vector"), NAMES - {"baseline", "baseline_aux", "baseline_relative"}),
}


@pytest.mark.parametrize("name", FITS)
def test_a_treatment_goes_with_variants_that_have_what_it_changes(name):
    treatment, fitting = FITS[name]
    for variant in NAMES:
        if variant in fitting:
            assert ArmJob(pretrain=make_job(variant), treatment=treatment).treatment == treatment
        else:
            with pytest.raises(ValueError, match=f"variant {variant} .* treatment: {name}"):
                ArmJob(pretrain=make_job(variant), treatment=treatment)


WRITTEN = {  # variant -> that of the paper and the treatment which its jobs are written with
    "baseline": ("baseline", None),
    "baseline_aux": ("internal_aux", {"anchor_only": True}),
    "baseline_relative": ("internal_aux", {"anchor_only": True, "anchor": "relative"}),
    "internal": ("internal", None),
    "internal_aux": ("internal_aux", None),
    "internal_relative": ("internal_aux", {"anchor": "relative"}),
    "final": ("all", {"sites": "final"}),
    "final_aux": ("all_aux", {"sites": "final"}),
    "final_relative": ("all_aux", {"sites": "final", "anchor": "relative"}),
    "all": ("all", None),
    "all_aux": ("all_aux", None),
    "all_relative": ("all_aux", {"anchor": "relative"}),
}


@pytest.mark.parametrize("treatment", [None, Treatment(temperature=True)])
def test_a_job_is_written_as_finished_runs_have_it_and_read_back(treatment):
    """The hash of this text names the runs of a study: another spelling would train them again."""
    assert WRITTEN.keys() == NAMES
    for variant, (paper, more) in WRITTEN.items():
        job = ArmJob(pretrain=make_job(variant), treatment=treatment)
        written = job.model_dump(mode="json")
        own = {} if treatment is None else {"temperature": True}
        assert (written["pretrain"]["variant"], written["treatment"] or {}) == (paper, {**(more or {}), **own})
        assert ArmJob.model_validate(written) == job


def test_the_hash_of_a_job_stays():
    config = load_config(CPU)
    stage = config.stage("S1c")
    hashes = {arm.name: digest(canonical_json(config.arm_job(stage, arm, 11))) for arm in stage.arms}
    assert hashes["anchor_only_05"] == "105dee496f244a6d"  # of the published rows
    assert hashes["anchor_only_05_relative"] == "03efa79fed966969"


def test_a_norm_replacement_brings_its_own_embedding_scale_and_final_gain():
    for own in ({"embedding_scale": True}, {"final_gain_init": 8.0}):
        with pytest.raises(ValueError, match="its treatment: norm has embedding_scale and final_gain_init"):
            ArmJob(pretrain=make_job("baseline"), treatment=Treatment.model_validate({"norm": DYT, **own}))


@pytest.mark.parametrize("name", ["S0", "S3", "S3x", "figures", "oddities", "trials", "positions"])
def test_a_stage_takes_no_name_that_a_rule_of_its_own_has(name):
    assert f"study.0.name: a stage cannot be named '{name}'" in study_of(name=name)
    assert study_of(name=f"{name}b") == ""


def test_faults_of_a_stage_are_told():
    arm = {"name": "one", "label": "One", "taper": "none", "anchor": "none"}
    assert "the baseline 'two' of stage S1" in study_of(arms=[arm], baseline="two")
    assert "arms of stage S1: one given twice" in study_of(arms=[arm, arm], baseline="one")
    assert "seeds of stage S1: 1 given twice" in study_of(seeds=[1, 1])
    assert "no width 17 in this config" in study_of(d_model=17)
    assert "stages of the study: S4 given twice" in study_of(name="S4")
    assert "study.0.name" in study_of(name="a/b")
    assert "study.0.arms.0.nam: unknown key; valid keys here are anchor, label" in study_of(arms=[{**arm, "nam": "x"}])
    assert study_of() == ""


def test_what_picks_a_setting_uses_other_seeds_than_what_reports_it():
    assert "stage S1 searches on seeds [1, 2], which tables report" in study_of(search=True)
    assert "stage S1 searches on seeds [2]," in study_of(search=True, seeds=[2, 103])
    assert study_of(search=True, seeds=[103, 104]) == ""
    raw = yaml.safe_load(TEST.read_text(encoding="utf-8"))
    raw["study"][0] |= {"search": True, "seeds": [7, 103]}
    raw["study"][1] |= {"seeds": [7, 8]}
    with pytest.raises(ConfigError, match=r"stage S1 searches on seeds \[7\]"):
        parse(Config, raw, "here")
    raw["study"], raw["seeds"] = raw["study"][:1], [103]  # those of the paper's tables count too
    with pytest.raises(ConfigError, match=r"stage S1 searches on seeds \[103\]"):
        parse(Config, raw, "here")


def test_names_that_are_not_there_are_told():
    config = load_config(TEST)
    with pytest.raises(UserError, match="no stage 'S9' in the study of this config; it has S1, S4"):
        config.stage("S9")
    with pytest.raises(UserError, match="no stage 'S1' in the study of this config; it has none"):
        load_config(ROOT / "config/demo.yaml").stage("S1")
    with pytest.raises(UserError, match="no arm 'x' in stage S4; it has baseline, "):
        config.stage("S4").arm("x")


# The study that is shipped


def stages() -> dict[str, Stage]:
    return {stage.name: stage for stage in load_config(CPU).study or ()}


def test_s1_crosses_every_start_with_every_later_end_for_both_variants():
    arms = stages()["S1"].arms
    windows = [(s, e) for s, e in itertools.product((0.05, 0.3, 0.5), (0.5, 0.7, 0.85, 1.0)) if e > s]
    wanted = {(v, *window) for v in ("internal_aux", "all_aux") for window in windows}
    found = [
        (arm.variant.name, arm.set["taper.start_fraction"], arm.set["taper.end_fraction"])
        for arm in arms
        if arm.variant.tapers
    ]
    assert len(found) == len(wanted) == 22
    assert set(found) == wanted
    assert len(stages()["S1"].seeds) >= 4


def test_the_shipped_searches_use_seeds_of_their_own():
    searching = {s for stage in stages().values() if stage.search for s in stage.seeds}
    reporting = {s for stage in stages().values() if not stage.search for s in stage.seeds}
    assert searching
    assert not searching & (reporting | set(load_config(CPU).seeds))


def test_the_controls_are_there():
    arms = stages()["S1c"].arms
    plain = [arm.set for arm in arms if arm.variant.plain and arm.treatment is None]
    assert len({rates.get("train.lr") for rates in plain}) >= 3
    assert any(arm.treatment and arm.treatment.temperature for arm in arms)
    assert {"final_relative", "baseline_aux", "baseline_relative"} <= {arm.variant.name for arm in arms}


def test_what_s4_varies_is_varied_for_baseline_too():
    """In S4, or on the same seeds in S1c."""
    assert stages()["S4"].seeds == stages()["S1c"].seeds
    varied = ("train.lr", "train.clip_norm")
    sets = {plain: set() for plain in (True, False)}
    for arm in (*stages()["S4"].arms, *(arm for arm in stages()["S1c"].arms if arm.variant.plain)):
        sets[arm.variant.plain] |= {(key, arm.set[key]) for key in varied if key in arm.set}
    assert sets[True] == sets[False] != set()


REPLACING = ("S2search", "S2")


def test_norm_replacements_of_s2_were_searched_for_with_their_final_gain_and_as_published():
    arms = {name: [arm for arm in stages()[name].arms if arm.treatment and arm.treatment.norm] for name in REPLACING}
    gains = {"S2search": (None, 8.0), "S2": (8.0,)}
    for stage in REPLACING:
        found = {(arm.treatment.norm.kind, arm.treatment.norm.final_gain_init) for arm in arms[stage]}
        assert found == {(kind, gain) for kind in ("dyt", "derf") for gain in gains[stage]}
    tried, reported = ({canonical_json(arm.job(make_job("baseline"))) for arm in arms[stage]} for stage in REPLACING)
    assert reported <= tried
