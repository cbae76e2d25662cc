"""Configs: strict, complete, explained; the shipped ones; the schema that Snakemake validates with."""

import copy
import json
import math
import re
from dataclasses import asdict

import jsonschema
import pytest
import yaml
from places import ROOT
from snakemake.utils import update_config

from tapernorm.models.decoder_config import DecoderConfig
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json, digest
from tapernorm_lab.config.jobs import PretrainJob
from tapernorm_lab.config.load import (
    ConfigError,
    json_schema,
    load_config,
    parse,
    read_yaml,
)
from tapernorm_lab.config.run import Config
from tapernorm_lab.config.sections import paper_d_ff
from tapernorm_lab.config.variants import VARIANTS

SHIPPED = sorted((ROOT / "config").glob("*.yaml"))
DEMO = ROOT / "config" / "demo.yaml"

shipped = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)


def raw(path=DEMO):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


WIDTHS = [
    {"d_model": 16, "d_ff": 40, "label": "d16", "steps": 300, "variants": ["baseline", "all_aux"]},
    {"d_model": 24, "d_ff": 64, "label": "d24", "steps": 300, "variants": list(VARIANTS)},
]


def changed(**changes):
    """The demo config, its sizes pinned, with dotted settings changed, `train__lr=...`."""
    config = {**raw(), "seeds": [1, 2], "widths": copy.deepcopy(WIDTHS)}
    config["model"] |= {"n_head": 4, "n_kv_head": 4}
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = config
        for name in parents:
            node = node[name]
        node[last] = value
    return config


def complaint(config, model=Config):
    with pytest.raises(ConfigError) as caught:
        parse(model, config, "here.yaml")
    return str(caught.value)


def first_width(**changes):
    return [{**WIDTHS[0], **changes}, *WIDTHS[1:]]


# The shipped configs


@shipped
def test_the_shipped_config_is_valid_and_named_after_its_file(path):
    assert load_config(path).run == path.stem


@shipped
def test_the_shipped_config_satisfies_the_schema_of_the_workflow(path):
    jsonschema.validate(raw(path), json.loads(json_schema()))


@shipped
def test_merged_over_the_default_config_as_snakemake_does_it_is_itself(path):
    merged = raw()
    update_config(merged, raw(path))
    assert merged == raw(path)


def test_a_config_that_left_a_key_out_would_inherit_it_from_the_default():
    merged, partial = raw(), changed(run="other")
    del partial["train"]["lr"]
    update_config(merged, partial)
    assert merged != partial


@shipped
def test_every_job_of_the_shipped_config_is_valid_json(path):
    config = load_config(path)
    for cell in config.pretrain_cells():
        job = config.pretrain_job(*cell)
        assert PretrainJob.model_validate_json(canonical_json(job)) == job
    for job in (config.corpus_job(), config.tokenizer_job(), config.tokens_job(), config.report_job()):
        assert type(job).model_validate_json(canonical_json(job)) == job


def test_the_paper_config_is_the_protocol_of_the_paper():
    config = load_config(ROOT / "config" / "paper.yaml")
    steps = {64: 100_000, 128: 100_000, 256: 200_000, 512: 300_000}
    assert {w.d_model: w.steps for w in config.widths} == steps
    assert {w.d_model: w.d_ff for w in config.widths} == {d: paper_d_ff(d) for d in steps}
    assert len(config.seeds) == 6
    model, train, taper = config.model, config.train, config.taper
    assert (model.n_layer, model.n_head, model.n_kv_head, model.context) == (8, 16, 16, 512)
    assert (model.norm, model.norm_eps, model.rope_theta, model.tie_head) == ("rmsnorm", 1e-6, 10_000.0, True)
    assert (train.batch, train.lr, train.warmup_fraction, train.betas) == (16, 3e-4, 0.05, (0.9, 0.95))
    assert (train.adam_eps, train.weight_decay, train.clip_norm) == (1e-8, 0.0, 1.0)
    assert (taper.start_fraction, taper.end_fraction) == (0.05, 1.0)
    assert (taper.ema_rate, taper.anchor_weight) == (0.01, 0.1)
    assert (config.data.source, config.tokenizer.vocab_size) == ("tinystories", 10_000)
    named = {assumption.setting for assumption in config.assumptions}
    assert {"widths.steps", "widths.d_ff", "model.norm_eps", "model.rope_theta", "train.adam_eps"} <= named


def test_swiglu_width_is_the_multiple_of_eight_near_eight_thirds_of_the_width():
    assert [paper_d_ff(d) for d in (64, 128, 256, 512)] == [168, 344, 680, 1368]


# The schema file


def test_the_schema_file_is_the_exported_schema():
    assert (ROOT / "workflow" / "schemas" / "config.schema.json").read_text(encoding="utf-8") == json_schema()


@pytest.mark.parametrize(
    "changes", [{"train__lrr": 1.0}, {"seeds": "1"}, {"model__norm": "batchnorm"}, {"taper__ema_rate": 2.0}]
)
def test_the_schema_refuses_what_the_model_refuses(changes):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed(**changes), json.loads(json_schema()))
    complaint(changed(**changes))


def test_the_schema_needs_every_key_that_the_model_needs():
    schema = json.loads(json_schema())
    for section in ("train", "model", "taper", "hardware", "data", "tokenizer"):
        for key in raw()[section]:
            config = raw()
            del config[section][key]
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(config, schema)
            assert f"{section}.{key}: missing" in complaint(config)


# Faults and their explanations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"taper__end_fractoin": 1.0},
            "taper.end_fractoin: unknown key; valid keys here are anchor_weight, ema_horizon",
        ),
        ({"trian": {}}, "valid keys here are assumptions, bench, caption, data"),
        (
            {"widths": first_width(stepz=3)},
            "widths.0.stepz: unknown key; valid keys here are d_ff, d_model, label",
        ),
    ],
)
def test_an_unknown_key_lists_the_valid_ones_of_its_section(changes, message):
    text = complaint(changed(**changes))
    assert text.startswith("here.yaml is not a valid Config:\n")
    assert message in text


def test_a_missing_key_lists_the_needed_ones():
    config = raw()
    del config["train"]["lr"], config["seeds"]
    text = complaint(config)
    assert "train.lr: missing; the keys needed here are adam_eps, batch, betas" in text
    assert "seeds: missing; the keys needed here are assumptions, bench, caption" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"widths": first_width(d_model=18)},
            "d_model 18 is not divisible by n_head 4: set d_model to a multiple of 4, or n_head to a divisor of 18",
        ),
        ({"widths": first_width(d_model=12)}, "head size 3 (d_model 12 / n_head 4) is odd"),
        ({"model__n_kv_head": 3}, "n_head 4 is not divisible by n_kv_head 3"),
        ({"seeds": [1, 2, 1]}, "seeds: 1 given twice"),
        ({"seeds": []}, "seeds: at least one is needed"),
        ({"seeds": [-1]}, "seeds.0: Input should be greater than or equal to 0 (got -1)"),
        ({"widths": [*WIDTHS, WIDTHS[1]]}, "widths' d_model: 24 given twice"),
        ({"widths": first_width(variants=["all", "all"])}, "variants at d_model 16: all given twice"),
        ({"widths": []}, "widths' d_model: at least one is needed"),
        ({"widths": first_width(variants=["every"])}, "widths.0.variants.0: there is no variant 'every'"),
        ({"widths": first_width(variants=["final_aux"])}, "widths.0.variants.0: 'final_aux'"),
        ({"taper__start_fraction": 0.5, "taper__end_fraction": 0.5}, "taper.end_fraction (0.5) must lie after"),
        ({"taper__start_fraction": 0.001}, "gate schedule needs 1 <= start < end, got start 0 and end 300"),
        ({"taper__ema_rate": 0.0}, "taper.ema_rate: Input should be greater than 0 (got 0.0)"),
        ({"train__lr": float("nan")}, "train.lr: Input should be a finite number"),
        ({"train__precision": "fp16"}, "train.precision: Input should be 'float32' or 'bf16' (got 'fp16')"),
        (
            {"data__source": "text"},
            "data.files [] and data.field None",
        ),
        ({"data__files": ["a.txt"]}, "data.source 'web' reads no data.files"),
        ({"run": "../up"}, "run: String should match pattern"),
        ({"tokenizer__vocab_size": 100}, "tokenizer.vocab_size: Input should be greater than or equal to 260"),
    ],
)
def test_an_impossible_setting_is_explained(changes, message):
    assert message in complaint(changed(**changes))


@pytest.mark.parametrize("run", ["published", "bench", "Bench"])
def test_a_run_has_a_folder_of_its_own(run):
    with pytest.raises(ConfigError, match=rf"run: '{run}' .* published, bench"):
        parse(Config, changed(run=run), "config")
    assert parse(Config, changed(run=f"{run}-2"), "config").run == f"{run}-2"


def test_all_faults_are_told_at_once():
    text = complaint(changed(train__lr=-1, taper__ema_rate=3, model__norm="none"))
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == [
        "model.norm",
        "train.lr",
        "taper.ema_rate",
    ]


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_a_config_that_is_no_mapping_is_refused(value):
    assert "(whole): Input should be a valid dictionary" in complaint(value)


@pytest.mark.parametrize("setting", ["train.momentum", "trian.lr", "widths.depth", "run.name", "train.lr.peak", ""])
def test_an_assumption_must_name_a_setting(setting):
    assumption = {"setting": setting, "assumed": True, "reason": "not given"}
    assert f"assumptions: {setting!r}" in complaint(changed(assumptions=[assumption]))


@pytest.mark.parametrize("setting", ["train.lr", "widths.steps", "seeds", "tokenizer.max_documents", None])
def test_an_assumption_about_a_setting_is_kept(setting):
    assumption = {"setting": setting, "assumed": True, "reason": "not given"}
    assert parse(Config, changed(assumptions=[assumption]), "here").assumptions[0].setting == setting


def test_a_config_is_frozen():
    config = load_config(DEMO)
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 1.0


# Files and overrides


def test_what_is_no_readable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no config file .*none.yaml'"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "bad.yaml").write_bytes(b"run: \xff\xfe")
    with pytest.raises(ConfigError, match=r"bad.yaml is not YAML"):
        load_config(tmp_path / "bad.yaml")


def test_overrides_change_their_setting_and_nothing_else():
    config = load_config(DEMO, ["train.lr=1e-4", "seeds=[7, 8, 9]", "run=other", "hardware.micro_batch=4"])
    expected = {**raw(), "seeds": [7, 8, 9], "run": "other"}
    expected["train"]["lr"] = 1e-4
    expected["hardware"]["micro_batch"] = 4
    assert config == parse(Config, expected, "here")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr", "write it as key.path=value"),
        ("train.lrr=1", "the config has no setting 'train.lrr'"),
        ("lr=1", "the config has no setting 'lr'"),
        ("train.lr.peak=1", "the config has no setting 'train.lr.peak'"),
        ("seeds=[1", "the value is not YAML"),
        ("seeds=[1, 1]", "1 given twice"),
        ("train.lr=fast", "train.lr: Input should be a valid number"),
    ],
)
def test_a_wrong_override_is_explained(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(DEMO, [override])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("widths.0.steps=5", ["widths is a list", "'widths=[...]'"]),
        ("gpt2.sizes.0.lr=1", ["gpt2.sizes is a list"]),
        ("train.betas=[0.9]", ["train.betas", "too few values"]),
        ("train.betas=[0.9, 0.9, 0.9]", ["train.betas", "at most 2"]),
        ("seeds={1: 1, 1: 2}", ["the key '1'", "line 1"]),
        ("train.lr=[" + "[" * 5000, ["nested too deeply"]),
        ("seeds=[" + "1" * 5000 + "]", ["too many digits"]),
        ("seeds=[" + "1" * 23 + "]", ["seeds.0", "less than or equal to"]),
        ("widths=5", ["widths", "tuple"]),
    ],
)
def test_an_override_that_cannot_be_is_one_line(override, words):
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, [override])
    assert all(word in str(caught.value) for word in words)
    assert len(str(caught.value).splitlines()) <= 2  # the config, and its fault


# What YAML reads otherwise than it looks, and what a type would convert in silence


def written(folder, text):
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return folder / "mine.yaml"


def laughs(levels):
    """A list whose items are all the same list, whose items are, and so on: 9 ** levels of them in a few lines."""
    lines = ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels + 1))]
    return "\n".join(lines)


def test_a_key_given_twice_is_refused_with_its_line(tmp_path):
    lines = DEMO.read_text(encoding="utf-8").splitlines()
    place = next(number for number, line in enumerate(lines, start=1) if line.startswith("  batch: 8"))
    lines.insert(place, "  batch: 16")
    with pytest.raises(ConfigError, match=rf"mine.yaml .* line {place + 1}: .*'batch' .* line {place}\b"):
        load_config(written(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["holds nothing", "config/demo.yaml"]),
        ("# only a comment", ["holds nothing"]),
        ("- 1\n- 2", ["holds a list"]),
        ("just words", ["holds a str"]),
        ("run: demo\nseeds: [010]", ["line 2", "010", "octal", "8"]),
        ("run: demo\nseeds: [1:30]", ["line 2", "1:30", "base 60"]),
        ("run: 2026-01-02", ["line 1", "date", "quote"]),
        ("run: 2026-99-02", ["line 1", "date", "quote"]),
        ("run: [", ["line 1"]),
        ("run: {a: 1, a: 2}", ["line 1", "'a'"]),
        ("run: &a [*a]", ["alias"]),
        ("run: " + "[" * 5000, ["nested too deeply"]),
        ("run: " + "1" * 5000, ["too many digits"]),
        ("run: \0", ["#x0000"]),
        ("run: !!python/object:os.system x", ["line 1", "constructor"]),
        ("--- 1\n--- 2", ["line 2", "another document"]),
        (laughs(30), ["aliases", "100,000"]),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text))
    assert all(word in str(caught.value) for word in ["mine.yaml", *words])
    assert "\n" not in str(caught.value)


def test_aliases_stand_for_copies(tmp_path):
    """An override changes the setting that it names and not another one that is written as the same alias."""
    config = raw()
    text = yaml.safe_dump({**config, "gpt2": None, "run": "mine"}, sort_keys=False)
    shared = "warmup_fraction: &f 0.05"
    text = text.replace("warmup_fraction: 0.05", shared).replace("start_fraction: 0.05", "start_fraction: *f")
    assert shared in text
    assert "*f" in text
    made = load_config(written(tmp_path, text), ["train.warmup_fraction=0.1"])
    assert (made.train.warmup_fraction, made.taper.start_fraction) == (0.1, 0.05)
    assert read_yaml(laughs(2)) == yaml.safe_load(laughs(2))  # control: few enough are read


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": [True]}, ["seeds", "True is not a number"]),
        ({"seeds": ["1"]}, ["seeds", "'1' is text"]),
        ({"seeds": [1.5]}, ["seeds.0", "1.5"]),
        ({"seeds": [2**63]}, ["seeds.0", "less than or equal"]),
        ({"train__lr": True}, ["train.lr", "True is not a number"]),
        ({"train__lr": "1:30"}, ["train.lr", "number"]),
        ({"train__lr": 10**400}, ["train.lr", "number"]),
        ({"train__batch": True}, ["train.batch", "True is not a number"]),
        ({"train__batch": "8"}, ["train.batch", "'8' is text"]),
        ({"train__batch": 10**12}, ["train.batch", "less than or equal"]),
        ({"train__betas": [0.9, False]}, ["train.betas", "False is not a number"]),
        ({"train__betas": [0.9]}, ["train.betas: too few values"]),
        ({"hardware__compile": 1}, ["hardware.compile", "1 is not true or false"]),
        ({"hardware__compile": "no"}, ["hardware.compile", "'no' is not true or false"]),
        ({"train__precision": True}, ["train.precision", "quote"]),
        ({"run": True}, ["run", "quote such a word"]),
        ({"run": "a" * 300}, ["run", "64"]),
        ({"widths": first_width(label="")}, ["widths.0.label: it must not be empty"]),
        ({"widths": first_width(label=" \t")}, ["widths.0.label: it must not be empty"]),
        ({"widths": first_width(label="two\nlines")}, ["widths.0.label", "pattern"]),
        ({"data__files": [""]}, ["data.files.0: it must not be empty"]),
        ({"data__field": ""}, ["data.field: it must not be empty"]),
    ],
)
def test_nothing_is_converted_in_silence(changes, words):
    assert all(word in complaint(changed(**changes)) for word in words)


@pytest.mark.parametrize(("text", "value"), [("1e-3", 0.001), ("1.0e-3", 0.001), (".5", 0.5), ("1", 1.0)])
def test_a_number_may_be_written_as_people_do(text, value):
    assert load_config(DEMO, [f"train.lr={text}"]).train.lr == value


def test_an_integer_may_be_written_with_a_point():
    assert load_config(DEMO, ["train.batch=8.0"]).train.batch == 8


# Jobs


def test_a_job_holds_what_its_variant_reads():
    configs = [parse(Config, changed(taper__end_fraction=end), "here") for end in (1.0, 0.5)]
    for variant in VARIANTS:
        job, changed_job = (config.pretrain_job(variant, 24, 1) for config in configs)
        assert (job == changed_job) == (variant == "baseline")
        assert (job.taper is None) == (variant == "baseline")
        assert job.taper is None or (job.taper.anchor_weight > 0) == (variant in ("internal_aux", "all_aux"))


def test_hardware_caption_and_other_widths_are_no_part_of_a_job():
    def job(**changes):
        return parse(Config, changed(**changes), "here").pretrain_job("all", 24, 1)

    assert job(hardware__threads=7, hardware__compile=True, caption="x", run="x", seeds=[1], widths=WIDTHS[1:]) == job()
    assert job(train__lr=0.1) != job()


def test_every_cell_appears_once_the_widest_first():
    config = load_config(DEMO)
    cells = config.pretrain_cells()
    assert len(cells) == len(set(cells)) == len(config.seeds) * sum(len(w.variants) for w in config.widths)
    widths = [d_model for _, d_model, _ in cells]
    assert widths == sorted(widths, reverse=True)


def test_a_width_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"no width 17 in this config; it has \[16, 24\]"):
        parse(Config, changed(), "here").width(17)


def test_variant_and_taper_settings_go_together():
    job = parse(Config, changed(), "here").pretrain_job("all", 24, 1).model_dump()
    assert "do not go together" in complaint({**job, "taper": None}, PretrainJob)
    assert "do not go together" in complaint({**job, "variant": "baseline"}, PretrainJob)


def test_a_decoder_shape_is_checked_wherever_it_comes_from():
    shape = asdict(parse(Config, changed(), "here").pretrain_job("all", 24, 1).model)

    def of_shape(raw):
        with pytest.raises(UserError) as caught:
            DecoderConfig.read(raw, "here")
        return str(caught.value)

    assert DecoderConfig.read(shape, "here").head_dim == 6
    assert "n_head 7" in of_shape({**shape, "n_head": 7})
    assert "unknown or missing depth" in of_shape({**shape, "depth": 2})
    assert "unknown or missing norm" in of_shape({k: v for k, v in shape.items() if k != "norm"})
    for name, value in [("d_model", 0), ("d_model", 24.0), ("d_model", True), ("context", 1), ("norm_eps", math.nan)]:
        assert name in of_shape({**shape, name: value})
    assert "norm must be rmsnorm or layernorm, got 'batchnorm'" in of_shape({**shape, "norm": "batchnorm"})
    assert "tie_head" in of_shape({**shape, "tie_head": 1})


# Digests


def test_equal_values_have_equal_digests_whatever_their_order():
    value = {"b": [1, {"y": 2.5, "x": None}], "a": "ü"}
    other = {"a": "ü", "b": [1, {"x": None, "y": 2.5}]}
    assert canonical_json(value) == canonical_json(other) == '{"a":"ü","b":[1,{"x":null,"y":2.5}]}'
    assert digest(value) == digest(other)
    assert digest(value) != digest({**value, "a": "u"})
    assert len(digest(value)) == 16


def test_a_config_and_its_dump_have_one_digest():
    config = load_config(DEMO)
    assert digest(config) == digest(config.model_dump(mode="json")) == digest(copy.deepcopy(config))


def test_numbers_that_json_has_no_word_for_are_refused():
    with pytest.raises(ValueError, match="Out of range float"):
        canonical_json({"lr": float("inf")})
