"""`save_pretrained` while a taper is attached: weights to go on from, never a folder that loads as something else."""

import copy
import pickle
import subprocess
import sys

import builders
import fakes
import pytest
import torch
import transformers
from builders import snapshot, tokens
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from tiny_models import gated, tiny

from tapernorm.architectures import ARCHITECTURES, logits_of
from tapernorm.checkpoints import store
from tapernorm.folding import fold
from tapernorm.schedule import GateSchedule
from tapernorm.taper import attach, taper_of
from tapernorm.util.atomic_files import read_json
from tapernorm.util.errors import UserError
from tapernorm_lab.models.c_per_feature import make_featurewise
from tapernorm_lab.models.fakeln import attach_fakeln


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # untied, tied
def test_what_is_written_loads_into_an_attached_model(name, tmp_path):
    _, model, driver = gated(name, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    other = tiny(name, seed=9, dtype=torch.float32)
    attach(other)
    missing, unexpected = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert (missing, unexpected) == ([] if name == "llama" else ["lm_head.weight"], [])
    taper_of(other).set_gate(driver.gate.item())
    assert torch.equal(logits_of(other, tokens()), logits_of(model, tokens()))


@pytest.mark.parametrize("class_name", [*sorted(ARCHITECTURES.keys() - {"Decoder"}), "AutoModelForCausalLM"])
@pytest.mark.parametrize("form", ["attached", "unfused", "fused", "ours"])
def test_no_class_of_transformers_loads_it_as_something_else(class_name, form, tmp_path):
    _, model, _ = gated("llama", dtype=torch.float32)
    if form == "ours":
        store.save(fold(model)[0], tmp_path)
    else:
        made = model if form == "attached" else fold(model, fused=form == "fused")[0]
        made.save_pretrained(tmp_path)
    with pytest.raises((ValueError, StrictDataclassError), match=r"norms are tapered, fixed or gone|type `tapernorm`"):
        getattr(transformers, class_name).from_pretrained(tmp_path)


@pytest.mark.parametrize("form", ["attached", "unfused", "fused"])
def test_the_method_of_the_class_would_write_a_folder_that_loads_as_another_function(form, tmp_path):
    _, model, _ = gated("llama", options={"final": True}, dtype=torch.float32)
    made = model if form == "attached" else fold(model, fused=form == "fused")[0]
    type(made).save_pretrained(made, tmp_path)
    again, info = type(made).from_pretrained(tmp_path, output_loading_info=True)
    assert not torch.equal(logits_of(again, tokens()), logits_of(made, tokens()))
    if form == "unfused":  # without so much as a warning
        assert not any(info.values())


@pytest.mark.parametrize("name", ["qwen2", "opt"])
def test_a_detached_model_is_saved_as_ever(name, tmp_path):
    stock = tiny(name, dtype=torch.float32)
    model = copy.deepcopy(stock)
    attach(model).detach()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits_of(again, tokens()), logits_of(stock, tokens()))


def test_what_a_folded_model_writes_loads_into_one_folded_alike(tmp_path):
    _, model, _ = gated("qwen2", options={"final": True}, dtype=torch.float32)
    folded, _ = fold(model)
    folded.save_pretrained(tmp_path)
    other, _ = fold(gated("qwen2", seed=9, options={"final": True}, dtype=torch.float32)[1])
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits_of(other, tokens()), logits_of(folded, tokens()))


@pytest.mark.parametrize("changed", [False, True])
def test_a_model_of_ours_is_guarded_where_its_norms_are_changed(changed, tmp_path):
    stock, model, _ = gated("gpt2", dtype=torch.float32)
    store.save(fold(model)[0] if changed else stock, tmp_path / "ours")
    store.load(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    if not changed:
        again = type(stock).from_pretrained(tmp_path / "theirs")
        assert torch.equal(logits_of(again, tokens()), logits_of(stock, tokens()))
    assert ("architectures" in read_json(tmp_path / "theirs" / "config.json")) != changed


def test_a_copy_saves_itself(tmp_path):
    _, model, _ = gated("llama", dtype=torch.float32)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.norm.weight.fill_(0.25)
    copied.save_pretrained(tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["model.norm.weight"], torch.full((12,), 0.25))


def test_what_a_checkpoint_has_no_place_for_is_refused(tmp_path):
    _, model, _ = gated("llama", dtype=torch.float32)
    with pytest.raises(UserError, match=r"takes no push_to_hub, variant: .* export it at g = 0, or detach\(\)"):
        model.save_pretrained(tmp_path, push_to_hub=True, variant="fp16")
    tiny("llama").save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"holds another model, .* give an empty folder"):
        model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other").exists()
    for _ in range(2):  # its own earlier checkpoint may be overwritten
        model.save_pretrained(tmp_path / "own")


def test_our_own_decoder_has_no_such_method():
    model = builders.decoder()
    attach(model)
    assert not hasattr(model, "save_pretrained")


# pickle

ONES = torch.ones_like(tokens())


def made_for_pickle():
    """One model of each kind that the package makes of a model of transformers, and one of our own decoders."""
    _, gpt2, _ = gated("gpt2", dtype=torch.float32)
    _, llama, _ = gated("llama", options={"final": True, "anchor_weight": 0.1}, dtype=torch.float32)
    features = tiny("qwen3", dtype=torch.float32).train()
    driver = attach(features, level_weight=0.1, schedule=GateSchedule(2, 5))
    for name in driver.swapped:
        make_featurewise(features.get_submodule(name))
    builders.observe(features, driver, ONES)
    fake = fakes.gpt2(dtype=torch.float32)
    attach_fakeln(fake, schedule=fakes.SCHEDULE, aux_weight=0.1, eot=fakes.EOT)
    decoder, _ = builders.calibrated(0.37, dtype=torch.float32, final=True)
    made = {"gpt2": gpt2, "llama": llama, "a constant per feature": features, "fakeln": fake, "decoder": decoder}
    for name in ("gpt2", "llama", "decoder"):
        taper_of(made[name]).set_gate(0.0)
        made |= {f"{name}, fused": fold(made[name])[0], f"{name}, unfused": fold(made[name], fused=False)[0]}
        taper_of(made[name]).set_gate(0.37)
    return made


_READER = """
import sys, torch
models = torch.load(sys.argv[1], weights_only=False)
from tapernorm.architectures import logits_of
from torch.utils.hooks import RemovableHandle
hooks = [number for model in models.values() for module in model.modules() for number in module._forward_pre_hooks]
assert RemovableHandle.next_id > max(hooks)  # or a hook to come would take the place of one of these
tokens = torch.load(sys.argv[2])
with torch.no_grad():
    torch.save({name: logits_of(model.eval(), tokens) for name, model in models.items()}, sys.argv[3])
"""


def test_every_kind_of_model_survives_a_pickle_into_a_fresh_interpreter(tmp_path):
    models = made_for_pickle()
    paths = [tmp_path / name for name in ("models.pt", "tokens.pt", "logits.pt")]
    for model in models.values():
        logits_of(model, tokens())  # leaves an activation in the probe, which is no part of a model
    torch.save(models, paths[0])
    torch.save(tokens(), paths[1])
    subprocess.run([sys.executable, "-c", _READER, *map(str, paths)], check=True)
    found = torch.load(paths[2])
    assert found.keys() == models.keys()
    for name, model in models.items():
        assert torch.equal(found[name], logits_of(model.eval(), tokens())), name


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_a_pickled_taper_goes_on_where_it_was(protocol, tmp_path):
    model = tiny("llama", dtype=torch.float32).train()
    driver = attach(model, final=True, anchor_weight=0.1, level_weight=0.1, schedule=GateSchedule(2, 5))
    builders.observe(model, driver, tokens())
    again = pickle.loads(pickle.dumps(model, protocol))
    other = taper_of(again)
    again.model.register_forward_pre_hook(lambda *_: None)  # another hook does not take the number of one of ours
    again.model.norm.register_forward_pre_hook(lambda *_: None)
    for k in range(6):
        for m, d in ((model, driver), (again, other)):
            d.set_step(k)
            with d.observe(), torch.no_grad():
                m(input_ids=tokens(seed=k), attention_mask=torch.ones_like(tokens()), use_cache=False)
                loss = d.anchor_loss()
    assert other.tokens.mask is not None
    assert loss.item() > 0
    assert snapshot(other.state_dict()) == snapshot(driver.state_dict())
    assert snapshot(again.state_dict()) == snapshot(model.state_dict())
    again.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() >= {"model.norm.gamma_t"}
    other.set_gate(1.0)
    other.detach()
    assert type(again.model.norm).__name__ == "LlamaRMSNorm"
    assert (len(again.model._forward_pre_hooks), len(again.model.norm._forward_pre_hooks)) == (1, 1)
