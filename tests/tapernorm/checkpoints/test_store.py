"""Models on disk: what is saved is what is loaded, and damage is named."""

import json
from dataclasses import asdict
from functools import partial

import builders
import pytest
import torch
from builders import NORMS, decoder, snapshot, tokens
from hugging_face import gpt2
from mixed import close_gate
from safetensors.torch import load_file, save_file
from tiny_models import CASES, tiny
from torch import nn
from transformers import GenerationConfig

from tapernorm.architectures import architecture_of, has_tied_head, logits_of
from tapernorm.checkpoints.store import load, save
from tapernorm.folding import fold
from tapernorm.models.decoder import Decoder
from tapernorm.taper import taper_of
from tapernorm.util.errors import UserError
from tapernorm_lab.models.fakeln_norms import FakeLayerNorm, SplitConv1D, make_fake

TAPERS = {
    "internal": {},
    "all": {"final": True},
    "final alone": {"final": True, "sites": []},
    "one site": {"sites": ["*.1.input_layernorm"]},
}


@pytest.mark.parametrize("options", TAPERS.values(), ids=TAPERS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("tie_head", [False, True])
def test_a_tapered_model_comes_back_at_gate_zero(tmp_path, options, norm, tie_head):
    shape = {"norm": norm, "tie_head": tie_head}
    model, driver = builders.calibrated(0.37, dtype=torch.float32, model_options=shape, **options)
    save(model, tmp_path)
    again = load(str(tmp_path))
    assert taper_of(again).swapped == driver.swapped
    assert taper_of(again).gate.item() == 0.0
    assert not torch.equal(again(tokens()), model(tokens()))
    driver.set_gate(0.0)
    assert torch.equal(again(tokens()), model(tokens()))
    for g in (0.37, 1.0):  # both gains were kept
        driver.set_gate(g)
        taper_of(again).set_gate(g)
        assert torch.equal(again(tokens()), model(tokens()))


def test_what_stands_in_a_norms_place_is_named(tmp_path):
    model, driver = builders.calibrated(dtype=torch.float32, sites=["*.0.*"])
    for made, word in ((model, "tapered"), (fold(model, fused=False)[0], "fixed_scale"), (fold(model)[0], "absent")):
        save(made, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["norms"] == dict.fromkeys(driver.swapped, word)


def test_the_biases_of_a_folded_layer_norm_are_wanted_and_no_others(tmp_path):
    model, _ = builders.calibrated(dtype=torch.float32, model_options={"norm": "layernorm"}, sites=["*.1.input*"])
    save(fold(model)[0], tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    attention = "model.layers.1.self_attn"
    missing = {k: v for k, v in state.items() if k != f"{attention}.q_proj.bias"}
    save_file(missing, path)
    with pytest.raises(UserError, match=rf"missing \['{attention}.q_proj.bias'\]"):
        load(tmp_path)
    for key in (f"{attention}.o_proj.bias", "model.layers.0.self_attn.q_proj.bias", "model.layers.7.mlp.up_proj.bias"):
        save_file({**state, key: torch.zeros(12)}, path)
        with pytest.raises(UserError, match=rf"unexpected \['{key}'\]"):
            load(tmp_path)


@pytest.fixture
def saved(tmp_path):
    model, _ = builders.calibrated(dtype=torch.float32)
    save(model, tmp_path)
    return tmp_path


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(name):
    def act(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:-5])

    return act


def without(part):
    """config.json without one of its parts."""

    def act(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != part}))

    return act


DAMAGES = {  # what is done to the folder of a tapered decoder -> what the message names
    "no config": (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
    "weights cut": (cut("model.safetensors"), "model.safetensors is damaged"),
    "config cut": (cut("config.json"), "config.json is damaged"),
    "no architecture": (without("architecture"), "lacks architecture"),
    "no shape": (without("config"), "lacks config"),
    "no norms": (without("norms"), "lacks norms"),
    "format": (partial(edit, format=2), "has format 2, .* 3"),
    "plain norms": (partial(edit, norms={}), "unexpected .*gamma_t"),
    "other norms": (
        partial(edit, norms=dict.fromkeys(["model.layers.0.input_layernorm", "model.norm"], "tapered")),
        "missing .*model.norm.c",
    ),
    "gone": (partial(edit, norms={"model.norm": "absent"}), "unexpected .*model.norm.weight"),
    "unknown word": (partial(edit, norms={"model.norm": "fixed_scal"}), "'fixed_scal' .*damaged"),
    "unknown norm": (partial(edit, norms={"model.layers.2.input_layernorm": "absent"}), r"layers\.2.*: it is damaged"),
    "shape": (partial(edit, config=asdict(builders.shape(d_ff=24))), "of another shape .*mlp.gate_proj.weight"),
    "architecture": (partial(edit, architecture="Encoder"), "architecture 'Encoder'; known: Decoder, GPT2LMHeadModel"),
}


@pytest.mark.parametrize(("act", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named(saved, act, message):
    act(saved)
    with pytest.raises(UserError, match=message):
        load(saved)


def test_a_head_missing_from_an_untied_model_is_noticed(tmp_path):
    save(decoder(dtype=torch.float32, tie_head=True), tmp_path)
    edit(tmp_path, config=asdict(builders.shape(tie_head=False)))
    with pytest.raises(UserError, match=r"missing .*lm_head.weight"):
        load(tmp_path)


def test_an_uncalibrated_taper_cannot_be_loaded_at_gate_zero(tmp_path):
    model, _ = builders.attached(dtype=torch.float32)
    save(model, tmp_path)
    with pytest.raises(UserError, match="needs calibrated norms"):
        load(tmp_path)


# GPT-2


def stock(**overrides):
    return gpt2(dtype=torch.float32, **overrides)


def tapered(final=True, **overrides):
    """A GPT-2 at g = 0."""
    model = stock(**overrides)
    close_gate(model, final=final)
    return model


def folded_decoder(shape, options, *, fused):
    return fold(builders.calibrated(dtype=torch.float32, model_options=shape, **options)[0], fused=fused)[0]


def faked(bars, **overrides):
    """A GPT-2 with FakeLN norms whose parts are removed where `bars` hold a number."""
    model = stock(**overrides)
    for name, values in bars.items():
        norm = make_fake(model, f"transformer.{name}")
        norm.sigma_bars.copy_(torch.tensor(values))
        norm.removed = tuple(value == value for value in values)
    return model


NAN = float("nan")
FAKES = {
    "all removed": {"h.0.ln_1": (0.7, 1.9), "h.1.ln_1": (1.2, 0.4), "h.0.ln_2": (1.6,), "ln_f": (0.9,)},
    "some removed": {"h.0.ln_1": (0.7, NAN), "h.1.ln_1": (NAN, NAN), "h.1.ln_2": (0.8,), "ln_f": (NAN,)},
}
MADE = {
    "stock": stock,
    "untied": lambda: stock(tie_word_embeddings=False),
    "other settings": lambda: stock(layer_norm_epsilon=0.2, scale_attn_by_inverse_layer_idx=True, n_inner=None),
    "tapered": tapered,
    "tapered inside": lambda: tapered(final=False),
    "unfused": lambda: fold(tapered(), fused=False)[0],
    "fused": lambda: fold(tapered())[0],
    "fused inside": lambda: fold(tapered(final=False))[0],
    "fused untied": lambda: fold(tapered(tie_word_embeddings=False))[0],
    **{f"fake, {name}": lambda bars=bars: faked(bars) for name, bars in FAKES.items()},
    "fake, folded": lambda: fold(faked(FAKES["all removed"]))[0],
}
SHAPES = [{"norm": norm, "tie_head": tie_head} for norm in NORMS for tie_head in (False, True)]
MADE |= {f"decoder, {shape}": partial(decoder, dtype=torch.float32, **shape) for shape in SHAPES}
MADE |= {
    f"decoder, {shape}, {name} folded, {fused}": partial(folded_decoder, shape, options, fused=fused)
    for shape in SHAPES
    for name, options in TAPERS.items()
    for fused in (False, True)
}


def told(model):
    return model.config.to_dict() if architecture_of(model).hugging_face else model.config


def anatomy(model):
    """Names and classes of what is no part of a taper's driver."""
    return [(n, type(m)) for n, m in model.named_modules() if not n.endswith(("probe", "anchor", "running"))]


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@torch.no_grad()
def test_a_model_comes_back_bitwise(tmp_path, make):
    model = make()
    save(model, tmp_path)
    again = load(tmp_path, type(model))
    arch = architecture_of(model)
    assert not again.training
    assert told(again) == told(model)
    assert anatomy(again) == anatomy(model)
    assert snapshot(again.state_dict()) == snapshot(model.state_dict())
    assert torch.equal(logits_of(again, tokens()), logits_of(model.eval(), tokens()))
    tied = getattr(model.config, arch.tied)
    assert has_tied_head(again) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    if arch.hugging_face:
        drawn = [m.generate(tokens(2, 3), max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (again, model)]
        assert torch.equal(*drawn)


GENERATION = {"eos_token_id": [0, 7], "repetition_penalty": 1.1, "temperature": 0.6, "suppress_tokens": [3]}


@pytest.mark.parametrize("make", [stock, tapered, lambda: fold(tapered())[0], lambda: fold(tapered(), fused=False)[0]])
def test_how_a_model_generates_comes_back(tmp_path, make):
    """Sampling options without do_sample contradict each other, and published models hold them all the same."""
    model = make()
    model.generation_config = GenerationConfig.from_dict(GENERATION)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.generation_config == model.generation_config
    assert {key: getattr(again.generation_config, key) for key in GENERATION} == GENERATION
    assert json.loads((tmp_path / "generation_config.json").read_text()).items() >= GENERATION.items()
    for options in ({}, {"suppress_tokens": None}):
        drawn = [m.eval().generate(tokens(2, 3), max_new_tokens=5, pad_token_id=0, **options) for m in (model, again)]
        assert torch.equal(*drawn)


def test_what_the_config_implies_of_generation_is_not_written_and_an_earlier_models_is_removed(tmp_path):
    model = stock()
    model.generation_config = GenerationConfig.from_dict(GENERATION)
    save(model, tmp_path)
    save(stock(eos_token_id=[0, 7]), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert load(tmp_path).generation_config.eos_token_id == [0, 7]
    save(model, tmp_path)
    save(decoder(dtype=torch.float32), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("content", ["{", "[]", '{"watermarking_config": 5}'])
def test_a_damaged_generation_config_is_named(tmp_path, content):
    model = stock()
    model.generation_config = GenerationConfig.from_dict(GENERATION)
    save(model, tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config\.json is damaged"):
        load(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_fields_beyond_the_architecture_come_back(tmp_path, name):
    """Those of tasks, of outputs, of other tools; only where the file lay and what wrote it are left out."""
    model = tiny(name, dtype=torch.float32)
    fields = {"sep_token_id": 4, "task_specific_params": {"a": 1}, "my_own": "z", "chunk_size_feed_forward": 2}
    fields |= {"output_hidden_states": True, "num_labels": 3, "eos_token_id": [0, 7]}
    for key, value in fields.items():
        setattr(model.config, key, value)
    save(model, tmp_path)
    again = load(tmp_path)
    said, found = ({**m.config.to_dict(), "_name_or_path": ""} for m in (model, again))
    assert found == said
    assert again.config.my_own == "z"
    assert torch.equal(logits_of(again, tokens()), logits_of(model, tokens()))
    save(tiny(name, dtype=torch.float32), tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    assert told.get("more", {}).keys() <= {"intermediate_size"}  # none of OPT's, and the tests set it all the same


def test_the_kinds_of_a_gpt2s_norms_are_named(tmp_path):
    save(faked(FAKES["some removed"]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["format"], config["architecture"]) == (3, "GPT2LMHeadModel")
    assert config["norms"] == {f"transformer.{name}": "fake" for name in FAKES["some removed"]}
    again = load(tmp_path)
    assert sum(isinstance(module, FakeLayerNorm) for module in again.modules()) == 4
    assert sum(isinstance(module, SplitConv1D) for module in again.modules()) == 2


def test_a_head_of_its_own_keeps_its_bias_and_the_embedding(tmp_path):
    model = tapered()
    folded, _ = fold(model)
    save(folded, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert {"lm_head.weight", "lm_head.bias"} <= state.keys()
    assert torch.equal(state["transformer.wte.weight"], model.transformer.wte.weight)
    again = load(tmp_path)
    again.tie_weights()  # undoes nothing
    assert torch.equal(logits_of(again, tokens()), logits_of(folded.eval(), tokens()))


def test_loading_draws_no_random_number(tmp_path):
    save(stock(), tmp_path)
    before = torch.get_rng_state()
    load(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_norm_epsilon": None}, "unknown or missing layer_norm_epsilon"),
        ({"n_heads": 3}, "does not fit GPT2Config: unknown or missing n_heads"),
        ({"n_embd": "wide"}, "config.json is damaged .*'n_embd' expected int"),
        ({"n_inner": 24}, "of another shape .*c_fc"),
        ({"tie_word_embeddings": False}, r"missing \['lm_head.weight'\]"),
    ],
)
def test_a_changed_setting_of_a_gpt2_is_noticed(tmp_path, changes, message):
    save(stock(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["config"]
    edit(tmp_path, config={k: v for k, v in {**config, **changes}.items() if k not in changes or v is not None})
    with pytest.raises(UserError, match=message):
        load(tmp_path)


def test_fake_norms_without_their_sigma_bars_are_refused(tmp_path):
    save(stock(), tmp_path)
    edit(tmp_path, norms={"transformer.ln_f": "fake"})
    with pytest.raises(UserError, match=r"says FakeLN.* weights lack transformer\.ln_f\.sigma_bars"):
        load(tmp_path)


def test_a_model_of_another_class_than_needed_is_refused(tmp_path):
    save(stock(), tmp_path)
    with pytest.raises(UserError, match="holds a GPT2LMHeadModel, and a Decoder is needed here"):
        load(tmp_path, Decoder)


def test_a_head_that_is_not_what_the_config_says_is_not_saved(tmp_path):
    model = stock()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    with pytest.raises(UserError, match=r"tie_word_embeddings is True .*lm_head .*tie_word_embeddings to False"):
        save(model, tmp_path)
