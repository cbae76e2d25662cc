"""Models on disk: what is saved is what is loaded, and damage is named."""

import json

import builders
import pytest
import torch
from builders import NORMS, decoder, snapshot, tokens
from safetensors.torch import load_file

from tapernorm.errors import UserError
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
    assert json.loads((tmp_path / "config.json").read_text())["tapered"] == list(driver.swapped)
    kinds = [type(module) for module in load(tmp_path).modules() if isinstance(module, TaperNorm)]
    assert len(kinds) == 2


def test_saving_leaves_nothing_else_behind_and_changes_nothing(tmp_path):
    model, driver = builders.calibrated(0.37, dtype=torch.float32)
    before = snapshot(model.state_dict()), snapshot(driver.state_dict())
    save(model, tmp_path / "new" / "folder")
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]
    assert (snapshot(model.state_dict()), snapshot(driver.state_dict())) == before


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
    edit(saved, format=2)
    with pytest.raises(UserError, match="has format 2; this version reads 1"):
        load(saved)


@pytest.mark.parametrize(
    ("tapered", "message"),
    [
        ([], "unexpected .*gamma_t"),
        (["model.layers.0.input_layernorm", "model.norm"], "missing .*model.norm.c"),
    ],
)
def test_weights_of_other_norms_do_not_fit(saved, tapered, message):
    edit(saved, tapered=tapered)
    with pytest.raises(UserError, match=f"does not fit config.json: .*{message}"):
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
