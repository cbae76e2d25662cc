"""Models on disk: what is saved is what is loaded, and damage is named."""

import json

import builders
import pytest
import torch
from builders import NORMS, decoder, snapshot, tokens
from safetensors.torch import load_file, save_file

from tapernorm.errors import UserError
from tapernorm.folding import fold
from tapernorm.models.store import load, save
from tapernorm.norms import TaperNorm
from tapernorm.taper import taper_of

TAPERS = {
    "internal": {},
    "all": {"final": True},
    "final alone": {"final": True, "sites": []},
    "one site": {"sites": ["*.1.input_layernorm"]},
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("tie_head", [False, True])
def test_a_standard_model_comes_back_bitwise(tmp_path, norm, tie_head):
    model = decoder(dtype=torch.float32, norm=norm, tie_head=tie_head)
    save(model, tmp_path)
    again = load(tmp_path)
    assert not again.training
    assert again.config == model.config
    assert snapshot(again.state_dict()) == snapshot(model.state_dict())
    assert torch.equal(again(tokens()), model(tokens()))
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tie_head
    with pytest.raises(UserError, match="carries no taper"):
        taper_of(again)


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


def test_the_tied_head_is_stored_once(tmp_path):
    for tie_head in (True, False):
        save(decoder(dtype=torch.float32, tie_head=tie_head), tmp_path)
        assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tie_head


def test_only_the_tapered_norms_are_named(tmp_path):
    model, driver = builders.calibrated(dtype=torch.float32, sites=["*.0.*"])
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["norms"] == dict.fromkeys(driver.swapped, "tapered")
    kinds = [type(module) for module in load(tmp_path).modules() if isinstance(module, TaperNorm)]
    assert len(kinds) == 2


def test_saving_leaves_nothing_else_behind_and_changes_nothing(tmp_path):
    model, driver = builders.calibrated(0.37, dtype=torch.float32)
    before = snapshot(model.state_dict()), snapshot(driver.state_dict())
    save(model, tmp_path / "new" / "folder")
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]
    assert (snapshot(model.state_dict()), snapshot(driver.state_dict())) == before


FOLDS = {"unfused": False, "fused": True}


@pytest.mark.parametrize("options", TAPERS.values(), ids=TAPERS)
@pytest.mark.parametrize("fused", FOLDS.values(), ids=FOLDS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("tie_head", [False, True])
def test_a_folded_model_comes_back_bitwise(tmp_path, options, fused, norm, tie_head):
    shape = {"norm": norm, "tie_head": tie_head}
    model, _ = builders.calibrated(dtype=torch.float32, model_options=shape, **options)
    folded, report = fold(model, fused=fused)
    save(folded, tmp_path)
    again = load(tmp_path)
    assert again.config == folded.config
    assert again.config.tie_head == (tie_head and not (fused and options.get("final", False)))
    assert report.head_untied == (tie_head and not again.config.tie_head)
    assert [(n, type(m)) for n, m in again.named_modules()] == [(n, type(m)) for n, m in folded.named_modules()]
    assert snapshot(again.state_dict()) == snapshot(folded.state_dict())
    assert torch.equal(again(tokens()), folded(tokens()))
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == again.config.tie_head


def test_what_stands_in_a_norms_place_is_named(tmp_path):
    model, driver = builders.calibrated(dtype=torch.float32, sites=["*.0.*"])
    for fused, word in ((False, "fixed_scale"), (True, "absent")):
        save(fold(model, fused=fused)[0], tmp_path)
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


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(UserError, match=f"holds no {name}: give the folder of a finished run"):
        load(saved)


def test_a_cut_file_is_damaged(saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"model.safetensors is damaged .*: run the job that wrote it again"):
        load(saved)


def test_a_cut_config_is_damaged(saved):
    path = saved / "config.json"
    path.write_text(path.read_text()[:-5])
    with pytest.raises(UserError, match=r"config.json is damaged .*: run the job that wrote it again"):
        load(saved)


def test_another_format_is_refused(saved):
    edit(saved, format=1)
    with pytest.raises(UserError, match="has format 1; this version reads 2"):
        load(saved)


@pytest.mark.parametrize(
    ("norms", "message"),
    [
        ({}, "unexpected .*gamma_t"),
        (dict.fromkeys(["model.layers.0.input_layernorm", "model.norm"], "tapered"), "missing .*model.norm.c"),
        ({"model.norm": "absent"}, "unexpected .*model.norm.weight"),
    ],
)
def test_weights_of_other_norms_do_not_fit(saved, norms, message):
    edit(saved, norms=norms)
    with pytest.raises(UserError, match=f"does not fit config.json: .*{message}"):
        load(saved)


@pytest.mark.parametrize("norms", [{"model.norm": "fixed_scal"}, {"model.layers.2.input_layernorm": "absent"}])
def test_an_unknown_norm_or_word_is_refused(saved, norms):
    edit(saved, norms=norms)
    with pytest.raises(UserError, match=r"config.json has 'model.* as '.*': it is damaged, run the job"):
        load(saved)


def test_weights_of_another_shape_do_not_fit(saved):
    config = builders.shape(d_ff=24).model_dump(mode="json")
    edit(saved, decoder=config)
    with pytest.raises(UserError, match=r"does not fit config.json: .*mlp.gate_proj.weight"):
        load(saved)


def test_a_head_missing_from_an_untied_model_is_noticed(tmp_path):
    save(decoder(dtype=torch.float32, tie_head=True), tmp_path)
    edit(tmp_path, decoder=builders.shape(tie_head=False).model_dump(mode="json"))
    with pytest.raises(UserError, match=r"missing .*lm_head.weight"):
        load(tmp_path)


def test_an_uncalibrated_taper_cannot_be_loaded_at_gate_zero(tmp_path):
    model, _ = builders.attached(dtype=torch.float32)
    save(model, tmp_path)
    with pytest.raises(UserError, match="needs calibrated norms"):
        load(tmp_path)
