"""Finding and loading models of transformers: what is known of them, and what is refused."""

import json

import pytest
import torch
from own_models import write_model
from refusals import refused
from safetensors.torch import load_file, save_file
from tiny_models import CASES, tiny

from tapernorm.architectures import has_tied_head
from tapernorm.checkpoints.pretrained import (
    commit_of,
    config_of,
    find,
    licence_of,
    load_pretrained,
    model_digest,
    skeleton,
)
from tapernorm.util.errors import UserError


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", CASES)
def test_every_class_loads_as_it_was_saved(name, tmp_path):
    model = tiny(name, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(find(tmp_path))
    assert type(loaded) is type(model)
    assert not loaded.training
    assert all(torch.equal(value, model.state_dict()[key].float()) for key, value in loaded.state_dict().items())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    bare = skeleton(tmp_path)
    assert {p.device.type for p in bare.parameters()} == {"meta"}
    assert has_tied_head(bare) == has_tied_head(model)
    assert sum(p.numel() for p in bare.parameters()) == sum(p.numel() for p in model.parameters())


def test_a_hub_name_is_copied_by_its_safe_files_alone_and_for_an_outline_without_its_weights(tmp_path, monkeypatch):
    asked = []

    def download(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find("someone/small") == tmp_path
    assert find("someone/small", weights=False) == tmp_path
    (name, everything), (_, small) = asked
    assert name == "someone/small"
    assert set(everything) - set(small) == {"*.safetensors"}
    assert not [pattern for pattern in everything if pattern.endswith((".py", ".bin", ".pt", "*"))]


ODD_CONFIGS = ["[" * 100_000, '{"a": ' + "1" * 5000 + "}", "3", "null", "[1]", "", "{", "\0", "caf\udce9"]


@pytest.mark.parametrize("content", ODD_CONFIGS[:5])
def test_a_damaged_generation_config_is_refused_in_one_line(tmp_path, content):
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with refused("generation_config.json"):
        load_pretrained(tmp_path)


def test_a_class_that_is_not_known_is_refused_with_those_that_are(tmp_path):
    write_model(tmp_path)
    edit(tmp_path, architectures=["MixtralForCausalLM"])
    with pytest.raises(UserError, match=r"holds a MixtralForCausalLM, .*known: GPT2LMHeadModel, .*LlamaForCausalLM"):
        config_of(tmp_path)
    edit(tmp_path, architectures=None)
    with pytest.raises(UserError, match="none named"):
        config_of(tmp_path)
    edit(tmp_path, model_type="no such type")
    with pytest.raises(UserError, match="cannot read a config of transformers"):
        config_of(tmp_path)


def test_code_beside_a_model_is_not_run(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "model/own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit(tmp_path / "model", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    assert type(load_pretrained(tmp_path / "model")).__module__.startswith("transformers.")
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_missing_cut_or_of_another_model_are_refused(tmp_path):
    write_model(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    save_file({**whole, "transformer.ln_f.weight": torch.ones(5)}, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"mismatched keys: .*ln_f.weight"):
        load_pretrained(tmp_path)
    lacking = {key: value for key, value in whole.items() if key != "transformer.ln_f.bias"}
    save_file({**lacking, "transformer.more": torch.ones(5)}, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing keys: transformer.ln_f.bias; unexpected keys: .*more"):
        load_pretrained(tmp_path)
    save_file({**whole, "transformer.h.0.attn.masked_bias": torch.ones(1)}, path, metadata={"format": "pt"})
    load_pretrained(tmp_path)  # a buffer of old files
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(UserError, match="damaged"):
        load_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="safetensors are needed"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n", "apache-2.0"),
        ("---\ntags:\n- a\nlicense: 'mit'\n---\ntext", "mit"),
        ("---\ntags: [a]\n---\nlicense: mit\n", None),
        ("license: mit\n", None),
        ("---\nlicense: mit\n", None),
        ("---\nlicense:\n---\n", None),
        ("", None),
    ],
)
def test_the_licence_is_what_the_head_of_the_card_says(card, licence, tmp_path):
    assert licence_of(tmp_path) is None
    (tmp_path / "README.md").write_text(card)
    assert licence_of(tmp_path) == licence


def test_the_commit_is_that_of_a_copy_of_the_hub_and_the_digest_that_of_config_and_weights(tmp_path):
    copy = tmp_path / "models--a--b/snapshots/0123abcd"
    assert (commit_of(copy), commit_of(tmp_path)) == ("0123abcd", None)
    for name, content in {"a.safetensors": "1", "b.safetensors": "2", "config.json": "{}"}.items():
        (tmp_path / name).write_text(content)
    before = model_digest(tmp_path)
    (tmp_path / "README.md").write_text("of no weight")
    assert model_digest(tmp_path) == before
    (tmp_path / "b.safetensors").write_text("3")
    changed = model_digest(tmp_path)
    (tmp_path / "config.json").write_text('{"rms_norm_eps": 1}')
    assert len({before, changed, model_digest(tmp_path)}) == 3
