"""Exports: they compute what the tapered model computes, load anywhere, and notice what is missing or damaged."""

import copy
import json
import os
from dataclasses import replace
from pathlib import Path

import builders
import pytest
import torch
import transformers
from builders import close, snapshot, tokens
from mixed import close_gate
from own_models import write_model
from safetensors.torch import load_file, save_file
from tiny_models import CASES, gated, judge, tiny
from torch import nn

import tapernorm
from tapernorm import export
from tapernorm.architectures import architecture_of, has_tied_head, logits_of
from tapernorm.checkpoints import stock_form as stock
from tapernorm.checkpoints import store
from tapernorm.checkpoints.model_card import Story
from tapernorm.checkpoints.pretrained import load_pretrained
from tapernorm.checkpoints.self_check import FILE, SelfCheck, typical_tokens
from tapernorm.folding import fold
from tapernorm.norms import TaperNorm, kind_of
from tapernorm.util.errors import UserError
from tapernorm_lab.models.fakeln_norms import restore_fake
from tapernorm_lab.own_model.export_run import export_run

ALL = {"final": True}
GENERATOR = torch.Generator().manual_seed(4)
KEPT = {"qwen3": "q_norm", "phi with norms of q and k": "q_layernorm", "stablelm with norms of q and k": "q_layernorm"}
NO_EPS = ("opt", "opt, untied and without biases")
STOCK = [name for name in CASES if name not in KEPT and name not in NO_EPS]


def narrow(name, *, options=ALL, **overrides):
    """A float32 model at g = 0."""
    return gated(name, options=options, **overrides)[1].float()


def plain(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()


def refused(*words):
    return pytest.raises(UserError, match="(?s)" + ".*".join(words))


# Stock


@pytest.mark.parametrize("name", STOCK)
def test_the_stock_form_is_the_tapered_model_in_plain_transformers(name, tmp_path):
    original, model, driver = gated(name, options=ALL)
    before = snapshot(model.state_dict())
    export.save(model, tmp_path / "out", form="stock")
    loaded = plain(tmp_path / "out", torch.float64)
    expected = logits_of(judge(original, model, driver.swapped, 0.0), tokens())
    layer_norms = any(isinstance(module, nn.LayerNorm) for module in original.modules())
    assert close(logits_of(loaded, tokens()), expected, 1e-12 if layer_norms else 1e-6)  # RMSNorms compute in float32
    assert not close(logits_of(original, tokens()), expected, 1e-2)
    assert type(loaded) is type(original)
    assert has_tied_head(loaded) == has_tied_head(original)
    assert not any(isinstance(module, TaperNorm) for module in loaded.modules())
    assert loaded.state_dict().keys() == original.state_dict().keys()
    assert snapshot(model.state_dict()) == before
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files >= {"model.safetensors", "config.json", "README.md", FILE}
    assert not any(name.endswith(".py") for name in files)
    assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_disarmed_norm_divides_by_a_constant_to_the_last_bit_whatever_the_token(name, size):
    """Against the fixed map, h c gamma_t, in float32; eps = 1e12 would be off by 5e-5 at activations of 1e4."""
    model = narrow(name)
    norm, disarmed = model.model.norm, stock.disarmed(model).model.norm
    h = size * torch.randn(50, 12, generator=torch.Generator().manual_seed(1))
    coefficient = (norm.c.double() * norm.gamma_t.double()).float()
    found = disarmed(h)
    offset = 2.0**-24 if name == "gemma" else 0.0  # 1 + w rounds once more
    assert ((found - h * coefficient).abs() <= (2.0**-23 + offset) * (h * coefficient).abs()).all()
    disarmed.variance_epsilon = disarmed.eps = 1e12
    with torch.no_grad():
        disarmed.weight.copy_(coefficient.double() * 1e6 - int(name == "gemma"))
    if size == 1e4:
        assert not close(disarmed(h), found, 1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama, biased and tied", "gemma"])
def test_a_stock_form_in_bf16_is_as_near_to_float64_as_the_folded_model(name, tmp_path):
    model = narrow(name)
    export.save(model, tmp_path / "out", form="stock", dtype=torch.bfloat16)
    folded = fold(model)[0]
    exact = logits_of(copy.deepcopy(folded).double(), tokens())
    ours = (logits_of(folded.bfloat16(), tokens()) - exact).abs().max()
    loaded = plain(tmp_path / "out", torch.bfloat16)
    assert {value.dtype for value in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}
    assert (logits_of(loaded, tokens()) - exact).abs().max() <= 4 * ours


def test_float16_overflows_and_is_refused_with_the_remedy(tmp_path):
    model = narrow("llama")
    with refused("float16", "bfloat16", "normfree"):
        export.save(model, tmp_path / "out", form="stock", dtype=torch.float16)
    assert not list(tmp_path.iterdir())
    assert stock.disarmed(model).half().model.norm.weight.isinf().any()
    export.save(model, tmp_path / "out", form="normfree", dtype=torch.float16)
    assert {value.dtype for value in load_file(tmp_path / "out/model.safetensors").values()} == {torch.float16}
    assert {parameter.dtype for parameter in tapernorm.load(tmp_path / "out").parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        *((name, ALL, inside) for name, inside in KEPT.items()),
        ("gpt2", {}, "ln_f"),
        ("llama", {}, "model.norm"),
        *((name, ALL, "no eps") for name in NO_EPS),
    ],
)
def test_a_norm_that_stays_or_an_eps_that_is_no_setting_rules_the_stock_form_out(name, options, word, tmp_path):
    with refused(word, "normfree"):
        export.save(narrow(name, options=options), tmp_path / "out", form="stock")
    assert not list(tmp_path.iterdir())


def test_a_stock_form_needs_a_closed_gate_and_a_taper(tmp_path):
    _, model, driver = gated("llama", options=ALL)
    driver.set_gate(0.5)
    with refused("gate is 0.5"):
        export.save(model, tmp_path / "out", form="stock")
    with refused("no norm of this one is"):
        export.save(tiny("llama"), tmp_path / "out", form="stock")


@pytest.mark.parametrize(("field", "wrong"), [("EPS", 2.0**-10), ("math", None)])
def test_a_wrong_constant_is_caught_before_anything_is_written(field, wrong, tmp_path, monkeypatch):
    if field == "EPS":
        monkeypatch.setattr(stock, "EPS", wrong)  # still below the mean squares
    else:
        monkeypatch.setattr(stock.math, "sqrt", lambda eps: 0.9 * eps**0.5)
    with refused("stock", "torch.float32", "normfree"):
        export.save(narrow("llama"), tmp_path / "out", form="stock")
    assert not list(tmp_path.iterdir())


def test_a_gain_convention_of_another_class_is_caught(tmp_path, monkeypatch):
    """Gemma's weight is the gain less one: here it would be the gain less a whole root."""
    monkeypatch.setattr(stock, "kind_of", lambda norm: replace(kind_of(norm), gain_offset=2.0**40))
    with refused("stock", "torch.float32", "normfree"):
        export.save(narrow("gemma"), tmp_path / "out", form="stock")


# How a model generates


@pytest.mark.parametrize("form", export.FORMS)
def test_generation_config_travels_from_the_base_to_every_form(form, tmp_path):
    """From a published folder through a run's folder, as the command does, and from Python."""
    said = {"eos_token_id": [0, 7], "repetition_penalty": 1.1, "temperature": 0.6, "top_p": 0.9}
    write_model(tmp_path / "base", "llama")
    (tmp_path / "base/generation_config.json").write_text(json.dumps(said))
    model = load_pretrained(tmp_path / "base")
    assert model.generation_config.eos_token_id == [0, 7]
    close_gate(model, final=True)
    store.save(model, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "command", form=form)
    export.save(model, tmp_path / "python", form=form)
    for folder in (tmp_path / "command", tmp_path / "python"):
        loaded = plain(folder) if form == "stock" else tapernorm.load(folder)
        assert {key: getattr(loaded.generation_config, key) for key in said} == said
        assert json.loads((folder / "generation_config.json").read_text()).items() >= said.items()


def test_a_generation_config_that_transformers_does_not_save_is_refused_with_its_reason(tmp_path):
    model = narrow("llama")
    model.generation_config.temperature = 0.5  # without do_sample, and not as it was loaded
    with refused("temperature"):
        export.save(model, tmp_path / "stock", form="stock")
    export.save(model, tmp_path / "normfree")
    assert not (tmp_path / "stock").exists()
    assert tapernorm.load(tmp_path / "normfree").generation_config.temperature == 0.5


# Normfree


@pytest.mark.parametrize("options", [{}, ALL], ids=["internal", "all"])
@pytest.mark.parametrize("name", CASES)
def test_a_normfree_export_loads_as_the_folded_model(name, options, tmp_path):
    model = narrow(name, options=options)
    export.save(model, tmp_path / "out", form="normfree")
    loaded = tapernorm.load(tmp_path / "out")
    folded, _ = fold(model)
    assert close(logits_of(loaded, tokens()), logits_of(folded, tokens()), 1e-6)
    assert close(logits_of(loaded, tokens()), logits_of(model, tokens()), 1e-5)
    assert not any(isinstance(module, TaperNorm) for module in loaded.modules())
    if has_tied_head(model):
        assert has_tied_head(loaded) == (not options)


@pytest.mark.parametrize("options", [{}, ALL], ids=["internal", "all"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_folded_model_is_exported_as_it_is(name, fused, options, tmp_path):
    folded, _ = fold(narrow(name, options=options), fused=fused)
    export.save(folded, tmp_path / "out")
    loaded = tapernorm.load(tmp_path / "out")
    assert [type(module) for module in loaded.modules()] == [type(module) for module in folded.modules()]
    assert torch.equal(logits_of(loaded, tokens()), logits_of(folded, tokens()))
    assert ("folded into the linear maps" in (tmp_path / "out/README.md").read_text()) == fused


def test_a_plain_model_is_not_exported(tmp_path):
    folded, _ = fold(narrow("gpt2"))
    with refused("no norm of this model is tapered"):
        export.save(tiny("gpt2"), tmp_path / "other")
    with refused("unknown form", "stock, normfree"):
        export.save(folded, tmp_path / "other", form="onnx")


def test_a_decoder_of_our_own_is_exported_normfree_and_has_no_stock_form(tmp_path):
    model = builders.decoder().float()
    close_gate(model, final=True)
    export.save(model, tmp_path / "out")
    assert close(logits_of(tapernorm.load(tmp_path / "out"), tokens()), logits_of(model, tokens()), 1e-5)
    with refused("Decoder", "normfree"):
        export.save(model, tmp_path / "other", form="stock")


def test_a_fakeln_model_is_exported_normfree(tmp_path):
    model = tiny("gpt2", dtype=torch.float32)
    names = architecture_of(model).norms(model)
    restore_fake(model, {n: 1.0 + torch.rand(2 if n.endswith("ln_1") else 1, generator=GENERATOR) for n in names})
    export.save(model, tmp_path / "out")
    assert close(logits_of(tapernorm.load(tmp_path / "out"), tokens()), logits_of(model, tokens()), 1e-5)
    card = (tmp_path / "out/README.md").read_text()
    assert "tapered (5)" in card
    assert "kept (0)" in card
    with refused("tapered model"):
        export.save(model, tmp_path / "other", form="stock")


# The self-check


@pytest.fixture(params=export.FORMS)
def exported(request, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/vocab.json").write_text('{"a": 0}')
    (tmp_path / "tokenizer/secrets.txt").write_text("not a tokenizer's")
    folder = tmp_path / "out"
    export.save(narrow("gpt2").train(), folder, form=request.param, tokenizer=tmp_path / "tokenizer")
    return folder


def test_a_whole_export_passes(exported):
    model, difference = export.check(exported)
    assert difference == 0
    assert snapshot(tapernorm.load(exported).state_dict()) == snapshot(model.state_dict())
    assert "vocab.json" in SelfCheck.read(exported).files
    assert not (exported / "secrets.txt").exists()
    (exported / "README.md").write_text("an edited card is no damage")
    export.check(exported)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "vocab.json"])
def test_a_damaged_or_missing_file_is_named(exported, name):
    flip(exported / name)
    with refused("self-check of", "failed", name, "sha256"):
        tapernorm.load(exported)
    (exported / name).unlink()
    with refused("self-check of", "failed", name, "is missing"):
        tapernorm.load(exported)


def test_a_damaged_self_check_is_named(exported):
    content = (exported / FILE).read_bytes()
    (exported / FILE).write_bytes(content[:-9])
    with refused("self-check of", FILE, "damaged"):
        tapernorm.load(exported)
    (exported / FILE).unlink()
    with refused("no " + FILE):
        export.check(exported)


def vouch(folder):
    """Write the self-check again for the files as they are, its logits as they were."""
    known = SelfCheck.read(folder)
    files = SelfCheck.of(folder, tiny("gpt2", dtype=torch.float32)).files
    SelfCheck(files, known.tokens, known.logits).write(folder)


def test_the_fixed_tokens_are_ones_that_the_model_holds_likely():
    model = tiny("llama", dtype=torch.float32)
    drawn = typical_tokens(model)
    assert torch.equal(drawn, typical_tokens(model))
    assert len(set(drawn[:, 0].tolist())) > 1
    random = torch.randint(29, drawn.shape, generator=torch.Generator().manual_seed(8))
    ours, theirs = (
        nn.functional.cross_entropy(logits_of(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
        for ids in (drawn, random)
    )
    assert ours < theirs - 1.0


def test_fixed_tokens_that_the_model_has_no_finite_logits_after_are_left_out():
    model = tiny("llama", dtype=torch.float32)
    drawn = typical_tokens(model)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[drawn[0, -1]] = torch.inf
    kept = typical_tokens(model)
    assert 0 < len(kept) < len(drawn)
    assert not (kept == drawn[0, -1]).any()
    with torch.no_grad():
        embedding.fill_(torch.inf)
    with pytest.raises(UserError, match="not finite after 1 tokens"):
        typical_tokens(model)


def test_weights_that_compute_something_else_fail_by_their_logits(exported):
    path = exported / "model.safetensors"
    state = load_file(path)
    state["transformer.h.1.mlp.c_proj.weight"][0, 0] += 5.0
    save_file(state, path, metadata={"format": "pt"})
    vouch(exported)
    with refused("self-check of", "logits"):
        tapernorm.load(exported)


def test_an_eps_that_normalises_again_fails_by_its_logits(tmp_path):
    folder = tmp_path / "out"
    export.save(narrow("gpt2"), folder, form="stock")
    config = json.loads((folder / "config.json").read_text())
    assert config["layer_norm_epsilon"] == stock.EPS
    (folder / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 1e-5}))
    vouch(folder)
    with refused("self-check of", "logits"):
        tapernorm.load(folder)


# The folder


def test_an_earlier_export_is_replaced_and_anything_else_is_left_alone(tmp_path):
    folder = tmp_path / "out"
    export.save(narrow("gpt2"), folder, form="stock")
    export.save(narrow("llama"), folder, form="normfree")
    assert type(tapernorm.load(folder)).__name__ == "LlamaForCausalLM"
    assert not (folder / "generation_config.json").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("all of it")
    with refused("not an export", "new folder"):
        export.save(narrow("gpt2"), tmp_path / "mine")
    assert (tmp_path / "mine/thesis.txt").read_text() == "all of it"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_notes_beside_an_earlier_export_stay_and_so_does_a_card_that_was_edited(tmp_path, capsys):
    folder = tmp_path / "out"
    export.save(narrow("gpt2"), folder, form="stock")
    (folder / "notes/deep").mkdir(parents=True)
    (folder / "notes/deep/thesis.txt").write_text("all of it")
    (folder / "mine.json").write_text("{}")
    export.save(narrow("llama"), folder)
    assert not (folder / "README.new.md").exists()
    (folder / "README.md").write_text("# My model")
    for _ in range(2):
        export.save(narrow("gpt2"), folder, form="stock")
        assert (folder / "notes/deep/thesis.txt").read_text() == "all of it"
        assert (folder / "README.md").read_text() == "# My model"
        assert "GPT2LMHeadModel" in (folder / "README.new.md").read_text()
        assert "README.md was edited" in capsys.readouterr().err
    export.check(folder)
    export.remove(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "mine.json", "notes"]


def test_a_file_of_ones_own_with_the_name_of_a_new_one_is_not_replaced(tmp_path):
    folder = tmp_path / "out"
    export.save(narrow("llama"), folder)
    (folder / "generation_config.json").write_text("{}")
    with refused("generation_config.json was not written by an export"):
        export.save(narrow("gpt2"), folder, form="stock")
    assert (folder / "generation_config.json").read_text() == "{}"
    assert type(tapernorm.load(folder)).__name__ == "LlamaForCausalLM"


def test_an_export_is_removed_with_its_folder_where_nothing_else_is_in_it(tmp_path):
    export.save(narrow("gpt2"), tmp_path / "out")
    export.remove(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export.remove(tmp_path / "out")


def full_disk(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SelfCheck, "write", full)


def no_rename(monkeypatch):
    stock_replace = os.replace

    def refuse(source, target):
        if str(source).endswith(".new"):
            raise PermissionError(13, "Permission denied")
        stock_replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)


@pytest.mark.parametrize(("fail", "word"), [(full_disk, "disk is full"), (no_rename, "permission denied")])
def test_an_export_that_cannot_be_written_leaves_the_earlier_one(fail, word, tmp_path, monkeypatch):
    export.save(narrow("gpt2"), tmp_path / "out")
    fail(monkeypatch)
    with refused(word):
        export.save(narrow("llama"), tmp_path / "out")
    assert type(tapernorm.load(tmp_path / "out")).__name__ == "GPT2LMHeadModel"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# The card


SCORE = {
    "rows": {"mean": 1.25, "trimmed_mean": 1.2, "max": 3.5, "nonfinite": 2},
    "tokens": {"p99_9": 9.75},
    "bits_per_byte": 0.875,
}
STORY = Story(
    base="someone/small",
    base_commit="0123abc",
    licence="apache-2.0",
    data="stories.txt",
    steps=300,
    scores={"held-out": {"before": SCORE, "after": {**SCORE, "rows": {**SCORE["rows"], "mean": None}}}},
    settings={"lr": 0.001},
    commit="fedcba",
)


@pytest.mark.parametrize("form", export.FORMS)
def test_the_card_tells_what_it_is_and_where_it_comes_from(form, tmp_path):
    export.save(narrow("llama"), tmp_path / "out", form=form, story=STORY)
    card = (tmp_path / "out/README.md").read_text()
    head, _, body = card.removeprefix("---\n").partition("\n---\n")
    library = {"stock": "transformers", "normfree": "tapernorm"}[form]
    lines = ["license: apache-2.0", "base_model: someone/small", f"library_name: {library}"]
    assert set(lines) <= set(head.splitlines())
    for part in (
        "0123abc",
        "fedcba",
        "stories.txt",
        "300 optimizer steps",
        '{"lr": 0.001}',
        "apache-2.0",
        "kept (0)",
        "tapered (5)",
    ):
        assert part in body
    assert "| held-out | before | 0.8750 | 1.2500 | 1.2000 | 3.5000 | 9.7500 | 2 |" in body
    assert "| held-out | after | 0.8750 | not finite |" in body
    assert ("eps in config.json" in body) == (form == "stock")
    assert ("from_pretrained" in body, "tapernorm.load" in body) == (form == "stock", form == "normfree")


def test_a_model_whose_logits_are_not_finite_is_not_exported(tmp_path):
    model = narrow("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.inf
    with refused("logits are not finite after 1 tokens"):
        export.save(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
