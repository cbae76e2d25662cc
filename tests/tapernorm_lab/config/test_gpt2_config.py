"""The GPT-2 sections of a config: the published protocol, jobs that hold what they need, settings that fit together."""

import copy

import pytest
import yaml
from places import ROOT

from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json, digest
from tapernorm_lab.config.gpt2 import METHODS
from tapernorm_lab.config.jobs import (
    BaseJob,
    BlocksJob,
    EvaluateJob,
    FinetuneJob,
)
from tapernorm_lab.config.load import ConfigError, load_config, parse
from tapernorm_lab.config.run import Config

PAPER = load_config(ROOT / "config" / "paper.yaml")
DEMO = load_config(ROOT / "config" / "demo.yaml")
assert DEMO.gpt2 is not None
HELD_OUT = DEMO.gpt2.corpora[0].model_dump(mode="json") | {"name": "again"}


def changed(place: str, value: object) -> dict:
    """The demo config with one GPT-2 setting changed, `sizes.0.lr`."""
    config = copy.deepcopy(yaml.safe_load((ROOT / "config" / "demo.yaml").read_text(encoding="utf-8")))
    node, (*parents, last) = config["gpt2"], place.split(".")
    for name in parents:
        node = node[int(name) if name.isdigit() else name]
    node[int(last) if last.isdigit() else last] = value
    return config


def complaint(place: str, value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(Config, changed(place, value), "here.yaml")
    return str(caught.value)


def test_the_paper_config_is_the_published_protocol() -> None:
    """Section 10's two tables, row by row."""
    gpt2 = PAPER.gpt2
    assert gpt2 is not None
    sizes = {s.name: s for s in gpt2.sizes}
    assert list(sizes) == ["small", "medium", "large", "xl"]
    rows = {
        "lr": (6e-4, 6e-4, 3e-4, 1e-4),
        "min_lr": (3e-4, 3e-4, 4e-5, 2e-5),
        "warmup_steps": (25, 10, 15, 20),
        "decay_steps": (300, 500, 1200, 1200),
        "steps": (300, 500, 600, 800),
        "micro_batch": (32, 22, 28, 18),
        "fakeln_weight": (0.1, 0.1, 0.03, 0.01),
        "anchor_weight": (0.1, 0.1, 0.1, 0.01),
    }
    for setting, values in rows.items():
        assert tuple(getattr(size, setting) for size in sizes.values()) == values, setting
    assert [size.batch // size.micro_batch for size in sizes.values()] == [16, 23, 18, 28]
    stages = {
        "mlp": ((20, 2), (20, 2), (30, 4), (50, 4)),
        "qk": ((44, 2), (68, 2), (174, 4), (242, 4)),
        "v": ((68, 3), (116, 3), (318, 6), (434, 6)),
    }
    for stage, values in stages.items():
        found = [(getattr(s.fakeln, f"{stage}_start"), getattr(s.fakeln, f"{stage}_gap")) for s in sizes.values()]
        assert tuple(found) == values, stage
    assert [size.fakeln.final for size in sizes.values()] == [104, 188, 534, 722]
    assert [(s.taper.start, s.taper.end) for s in sizes.values()] == [(20, 104), (20, 188), (30, 534), (50, 722)]
    train = gpt2.train
    assert (train.betas, train.weight_decay, train.clip_norm, train.ema_rate) == ((0.9, 0.999), 0.01, 1.0, 0.1)
    assert (gpt2.context, gpt2.block_documents, train.precision) == (1024, 512, "bf16")
    assert [p.source for p in sizes["xl"].published] == ["schaeff/gpt2-xl_vanilla800", "schaeff/gpt2-xl_LNFree800"]


@pytest.mark.parametrize("config", [PAPER, DEMO], ids=lambda config: config.run)
def test_every_job_is_valid_json(config: Config) -> None:
    assert config.gpt2 is not None
    for cell in config.finetune_cells():
        job = config.finetune_job(*cell)
        assert FinetuneJob.model_validate_json(canonical_json(job)) == job
    for size in config.gpt2.sizes:
        assert BaseJob.model_validate_json(canonical_json(config.base_job(size.name))) == config.base_job(size.name)
    for model in config.models_under_test():
        job = config.evaluate_job(model.method, model.size, model.seed)
        assert EvaluateJob.model_validate_json(canonical_json(job)) == job
    assert len(config.models_under_test()) == len(config.finetune_cells()) + sum(
        1 + len(size.published) for size in config.gpt2.sizes
    )


def test_a_job_depends_on_the_settings_of_its_own_method_alone() -> None:
    def jobs(config: Config) -> dict[str, str]:
        return {method: digest(config.finetune_job(method, "tiny", 1)) for method in METHODS}

    usual = jobs(DEMO)
    settings = {
        "sizes.0.fakeln.v_start": 70,
        "sizes.0.fakeln_weight": 0.2,
        "sizes.0.micro_batch": 4,
        "sizes.0.anchor_weight": 0.2,
        "sizes.0.taper.end": 105,
        "sizes.0.devices_per_job": 2,
        "sizes.0.lr": 2e-3,
        "sizes.1.lr": 2e-3,
        "train.log_every": 7,
    }
    affected = {}
    for place, value in settings.items():
        found = jobs(parse(Config, changed(place, value), "x"))
        affected[place] = {method for method in METHODS if found[method] != usual[method]}
    every, tapered = set(usual), {"internal_aux", "all_aux"}
    assert list(affected.values()) == [{"fakeln"}, {"fakeln"}, {"fakeln"}, tapered, tapered, set(), every, set(), every]


def test_only_scored_blocks_are_limited() -> None:
    assert DEMO.blocks_job("train") == BlocksJob(context=64, block_documents=None, max_rows=1000)
    assert DEMO.blocks_job("base").max_rows is None
    assert DEMO.blocks_job("stdlib").max_rows == 1000
    with pytest.raises(UserError, match="no text 'stlib' in gpt2"):  # whose max_rows would be lost
        DEMO.blocks_job("stlib")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("sizes.0.min_lr", 1.0, "min_lr (1.0) exceeds lr"),
        ("sizes.0.micro_batch", 5, "batch (16) is not a multiple of micro_batch (5)"),
        ("sizes.0.decay_steps", 299, "steps (300)"),
        ("sizes.0.taper", {"start": 20, "end": 301}, "taper.end (301) lies after the last step (300)"),
        ("sizes.0.taper", {"start": 20, "end": 20}, "taper.end (20) must lie after taper.start (20)"),
        ("sizes.0.fakeln.final", 301, "fakeln.final (301) lies after the last step (300)"),
        ("sizes.0.fakeln.qk_start", 22, "at step 22, before transformer.h.1.ln_2 at step 23"),
        ("sizes.0.source", "gpt2", "either `source` or `fresh`"),
        ("sizes.1.name", "tiny", "gpt2 sizes' names: tiny given twice"),
        ("bpe", "gpt2", "gpt2.tokenizer and gpt2.bpe"),
        ("base_text", [], "gpt2.base_text"),
        ("methods", ["vanilla", "vanilla"], "gpt2.methods: vanilla given twice"),
        ("corpora.2.of", "later", "stdlib_filtered filters 'later'"),
        ("corpora.2.seen", None, "kind 'filtered' needs seen"),
        ("corpora.0.seen", "base", "kind 'held_out' reads no seen"),
        ("corpora.1.text.0.valid_fraction", 0.5, "valid_fraction must be 1"),
        ("corpora.2.max_rows", 5, "stdlib_filtered: kind 'filtered' reads no max_rows"),
        ("corpora.0.name", "train", "train: base and train"),
        ("corpora.1", HELD_OUT, "gpt2.corpora: web, again"),
        ("text.0.part", "first", "data.part is 'first': only source 'python_stdlib'"),
        ("sizes.0.fresh.shape.n_head", 5, "d_model 32 is not divisible by n_head 5"),
        ("sizes.0.fakeln.gap", 1, "unknown key; valid keys here are ema_rate"),
    ],
)
def test_an_impossible_setting_is_explained(place: str, value: object, message: str) -> None:
    assert message in complaint(place, value)


def test_a_config_may_leave_the_track_out() -> None:
    raw = yaml.safe_load((ROOT / "config" / "demo.yaml").read_text(encoding="utf-8"))
    config = parse(Config, {**raw, "gpt2": None}, "x")
    assert config.finetune_cells() == config.models_under_test() == []
    with pytest.raises(UserError, match="its `gpt2` is null"):
        config.base_job("tiny")


def test_an_unknown_size_or_text_is_named_with_those_there_are() -> None:
    with pytest.raises(UserError, match="no GPT-2 size 'huge' in this config; it has tiny, mini"):
        DEMO.base_job("huge")
    with pytest.raises(UserError, match="no text 'web' in gpt2; there are base, train, stdlib"):
        DEMO.gpt2_corpus_job("web")
    with pytest.raises(UserError, match="trains its tokenizer"):
        DEMO.bpe_job()
    with pytest.raises(UserError, match="as published"):
        PAPER.gpt2_tokenizer_job()


@pytest.mark.parametrize("size", PAPER.gpt2.sizes, ids=lambda size: size.name)
def test_a_finetune_of_the_paper_is_saved_on_its_way(size) -> None:
    """It has fewer steps than a pre-training has between two checkpoints."""
    assert PAPER.finetune_hardware(size.name).checkpoint_every <= size.steps / 5 < PAPER.hardware.checkpoint_every
