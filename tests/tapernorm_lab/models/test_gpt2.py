"""GPT-2 of transformers: attached, gated, folded and generating, it is judged by a stock one with reference norms."""

import copy

import builders
import huggingface_hub
import numpy as np
import pytest
import reference
import torch
import transformers
from builders import array, close, snapshot, tokens
from hugging_face import gpt2, gpt2_config, reference_gpt2
from mixed import close_gate
from own_models import write_model
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from tapernorm import folding
from tapernorm.architectures import (
    architecture_of,
    context_of,
    has_tied_head,
    logits_of,
    vocabulary_of,
)
from tapernorm.checkpoints import store
from tapernorm.folding import fold
from tapernorm.norms import FixedScale, TaperNorm
from tapernorm.taper import attach, taper_of
from tapernorm.util.errors import UserError
from tapernorm.util.rng import generator
from tapernorm_lab.config.gpt2 import Gpt2Shape
from tapernorm_lab.models.fakeln_norms import make_fake
from tapernorm_lab.models.gpt2 import fresh, is_disarmed, load_base

INTERNAL = ["transformer.h.0.ln_1", "transformer.h.0.ln_2", "transformer.h.1.ln_1", "transformer.h.1.ln_2"]
FINAL = "transformer.ln_f"
TAPERS = {"internal": {}, "all": {"final": True}, "final alone": {"final": True, "sites": []}}
CONFIGS = {
    "stock": {},
    "square": {"n_inner": 12, "vocab_size": 29},
    "large epsilon": {"layer_norm_epsilon": 0.3},
    "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "upcast": {"reorder_and_upcast_attn": True, "attention": "eager", "dtype": torch.float32},
    "eager": {"attention": "eager"},
    "untied": {"tie_word_embeddings": False},
}
SINGLE = {"upcast"}  # transformers refuses it in float64
FORMS = {"unfused": False, "fused": True}

every_taper = pytest.mark.parametrize("options", TAPERS.values(), ids=TAPERS)
every_form = pytest.mark.parametrize("fused", FORMS.values(), ids=FORMS)
every_config = pytest.mark.parametrize("name", CONFIGS)


def tolerance(name):
    return 1e-4 if name in SINGLE else 1e-12


def gated(options=None, **overrides):
    """A stock model, one like it at g = 0 with random c, gamma and gamma_t, and its taper."""
    stock = gpt2(**overrides)
    model = copy.deepcopy(stock)
    driver = close_gate(model, **(options or {}))
    stock.load_state_dict({key: value for key, value in model.state_dict().items() if key in stock.state_dict()})
    return stock, model, driver


def forms(options, **overrides):
    """Pairs (model, stock model with reference norms) at g = 1, at g = 0, and folded both ways."""
    stock, model, driver = gated(options, **overrides)
    at_zero = reference_gpt2(stock, model, driver.swapped, 0.0)
    open_gate = copy.deepcopy(model)
    taper_of(open_gate).set_gate(1.0)
    return {
        "g = 1": (open_gate, stock),
        "g = 0": (model, reference_gpt2(stock, model, driver.swapped, 0.0)),
        "unfused": (fold(model, fused=False)[0], at_zero),
        "fused": (fold(model)[0], at_zero),
    }


# Attaching


def test_cross_attention_is_refused():
    model = gpt2(add_cross_attention=True)
    with pytest.raises(UserError, match=r"GPT2LMHeadModel with add_cross_attention .* is not supported"):
        attach(model)


def test_what_the_house_asks_of_any_model():
    model = gpt2()
    assert (context_of(model), vocabulary_of(model)) == (11, 29)
    assert has_tied_head(model)
    assert not has_tied_head(gpt2(tie_word_embeddings=False))
    assert torch.equal(logits_of(model, tokens()), model(tokens()).logits)
    ours = builders.decoder()
    assert (context_of(ours), vocabulary_of(ours)) == (11, 29)
    assert torch.equal(logits_of(ours, tokens()), ours(tokens()))


# Any gate, any config


@every_config
@every_taper
@pytest.mark.parametrize("g", [1.0, 0.37, 0.0])
def test_every_gate_computes_what_the_reference_norms_compute(name, options, g):
    stock, model, driver = gated(options, **CONFIGS[name])
    driver.set_gate(g)
    expected = logits_of(reference_gpt2(stock, model, driver.swapped, driver.gate.item()), tokens())
    assert close(logits_of(model, tokens()), expected, tolerance(name))
    if g < 1:
        assert not close(logits_of(model, tokens()), logits_of(stock, tokens()), 1e-2)


@every_config
@every_taper
@every_form
def test_the_folded_model_is_the_reference_at_gate_zero(name, options, fused):
    stock, model, driver = gated(options, **CONFIGS[name])
    expected = logits_of(reference_gpt2(stock, model, driver.swapped, 0.0), tokens())
    folded, report = fold(model, fused=fused)
    assert close(logits_of(folded, tokens()), expected, tolerance(name))
    assert report.largest_logit_difference <= tolerance(name) * expected.abs().max()
    assert [entry.name for entry in report.norms] == list(driver.swapped)
    left = nn.Identity if fused else FixedScale
    assert all(type(folded.get_submodule(entry.name)) is left for entry in report.norms)
    assert {type(m) for n, m in folded.named_modules() if n.endswith(("c_attn", "c_fc"))} == {Conv1D}


# The algebra of the fold


def folded_by_hand(model, *, with_beta=True, centring="inputs", transposed=False):
    """The fold, written out here for Conv1D, with faults to order."""
    folded = copy.deepcopy(model)
    folded.lm_head.weight = nn.Parameter(folded.lm_head.weight.detach().clone())
    for name in [name for name, module in model.named_modules() if isinstance(module, TaperNorm)]:
        norm = model.get_submodule(name)
        (consumer,) = architecture_of(model).consumers(name)
        layer = folded.get_submodule(consumer)
        W = layer.weight.detach().T if consumer == "lm_head" else layer.weight.detach()  # (in, out)
        coefficient = norm.c * norm.gamma_t
        scaled = W * (coefficient if transposed else coefficient[:, None])
        if centring:
            scaled = scaled - scaled.mean(0 if centring == "inputs" else 1, keepdim=True)
        bias = torch.zeros(W.shape[1], dtype=W.dtype) if layer.bias is None else layer.bias.detach()
        layer.bias = nn.Parameter(bias + norm.bias @ W if with_beta else bias)
        layer.weight = nn.Parameter(scaled.T if consumer == "lm_head" else scaled)
        folded.set_submodule(name, nn.Identity())
    return folded


FAULTS = {
    "beta not in the bias": {"with_beta": False},
    "centring omitted": {"centring": None},
    "centred over the outputs": {"centring": "outputs"},
    "wrong axis": {"transposed": True},
}
SQUARE = {"n_inner": 12, "vocab_size": 12, "n_embd": 12}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("sites", [["*.ln_2"], []], ids=["c_fc", "lm_head"])  # square ones: a turned axis fits
@torch.no_grad()
def test_a_wrong_fold_is_noticed(fault, sites):
    _, model, _ = gated({"final": not sites, "sites": sites}, **SQUARE)
    ids = tokens() % 12
    assert close(logits_of(folded_by_hand(model), ids), logits_of(model, ids))
    assert not close(logits_of(folded_by_hand(model, **fault), ids), logits_of(model, ids), 1e-3)


# FakeLN


def faked(names=(*INTERNAL, FINAL)):
    """A GPT-2 whose norms `names` divide by a constant, q and k's another than v's."""
    model = gpt2()
    for i, name in enumerate(names):
        norm = make_fake(model, name)
        norm.sigma_bars.copy_(builders.uniform(len(norm.parts), seed=30 + i))
        norm.removed = (True,) * len(norm.parts)
    return model


def test_fakeln_folds_as_a_taper_does_and_the_report_says_so():
    model = faked()
    folded, report = fold(model)
    assert close(logits_of(folded, tokens()), logits_of(model, tokens()))
    assert {type(m) for n, m in folded.named_modules() if n.endswith("c_attn")} == {Conv1D}
    assert report.head_untied
    norm, attention = model.transformer.h[1].ln_1, model.transformer.h[1].attn.c_attn
    after = folded.transformer.h[1].attn.c_attn
    W, bars = array(attention.weight), array(norm.sigma_bars)
    expected, bias = [], []
    for columns, bar in ((slice(0, 24), bars[0]), (slice(24, 36), bars[1])):
        numbers = {"c": 1 / bar, "gamma_t": array(norm.weight), "beta": array(norm.bias)}
        part, shift = reference.fold_layer_norm(W[:, columns], array(attention.bias)[columns], **numbers)
        expected.append(part)
        bias.append(shift)
    assert close(after.weight, np.concatenate(expected, 1))
    assert close(after.bias, np.concatenate(bias))
    entry = next(entry for entry in report.norms if entry.name == "transformer.h.1.ln_1")
    products = np.outer(array(norm.weight), 1 / bars)
    assert entry.c is None
    assert (entry.coefficient_min, entry.coefficient_max) == pytest.approx((products.min(), products.max()), rel=1e-12)


def test_two_sigma_bars_do_not_fit_one_explicit_scale():
    with pytest.raises(UserError, match=r"cannot fold transformer\.h\.0\.ln_1 with fused=False: .*fold\(model\)"):
        fold(faked(), fused=False)


# The tied head


def test_the_final_norm_goes_into_a_head_of_its_own(tmp_path):
    stock, model, _ = gated({"final": True})
    folded, report = fold(model)
    assert report.head_untied
    assert torch.equal(folded.transformer.wte.weight, stock.transformer.wte.weight)
    assert folded.lm_head.bias.shape == (29,)
    assert (model.config.tie_word_embeddings, folded.config.tie_word_embeddings) == (True, False)
    assert has_tied_head(model)
    expected = logits_of(folded, tokens())
    for recompute in (True, False):  # what loading does, and what resizing does
        folded.tie_weights(recompute_mapping=recompute)
    assert torch.equal(logits_of(folded, tokens()), expected)
    folded.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == folded.state_dict().keys()


def test_a_fold_into_the_shared_weight_is_noticed(monkeypatch):
    def into_shared(layer, weight, shift):
        stored = weight.T if isinstance(layer, nn.Linear) else weight
        layer.weight.data.copy_(stored)

    _, model, _ = gated({"final": True})
    monkeypatch.setattr(folding, "replace", into_shared)
    folded, report = fold(model)
    assert not torch.equal(folded.transformer.wte.weight, model.transformer.wte.weight)
    assert report.largest_logit_difference > 0.1


def twice(layer, args):
    return (args[0] * 2,)


def more(layer, args, output):
    return output + args[0].sum(-1, keepdim=True)


def product(layer, args, output):
    """Of the layer's own numbers: the input's other half is still the norm's output."""
    return output + torch.addmm(layer.bias, args[0].view(-1, args[0].shape[-1])[:, :12], layer.weight).view_as(output)


@pytest.mark.parametrize("kind", ["Conv1D", "split Conv1D", "nn.Linear"])
@pytest.mark.parametrize(
    ("hook", "which"), [(twice, "forward_pre_hook"), (more, "forward_hook"), (product, "forward_hook")]
)
def test_what_a_hook_of_a_map_does_with_its_input_is_seen(kind, hook, which):
    model = faked() if kind == "split Conv1D" else gated({"final": True})[1]
    name = {"nn.Linear": "lm_head", "Conv1D": "transformer.h.1.mlp.c_fc"}.get(kind, "transformer.h.1.attn.c_attn")
    if kind == "nn.Linear" and hook is product:
        model.lm_head.register_forward_hook(lambda layer, args, output: output + args[0] @ layer.weight.T)
    else:
        getattr(model.get_submodule(name), f"register_{which}")(hook)
    with pytest.raises(UserError, match=r"cannot fold transformer\..*: its output also goes into \w+, outside any"):
        fold(model)


@pytest.mark.parametrize("fake", [False, True])
def test_a_map_fed_by_something_else_too_is_refused(fake):
    model = faked(["transformer.h.0.ln_1"]) if fake else gated({"sites": ["*.0.ln_1"]})[1]
    model.transformer.h[1].attn.c_attn = model.transformer.h[0].attn.c_attn
    with pytest.raises(UserError, match=r"h\.0\.attn\.c_attn: that layer is shared, .* not a tapered norm"):
        fold(model)


# transformers' own machinery

PADS = torch.tensor([0, 2, 1])  # in front of each row


def padded():
    """A left-padded batch: ids, mask and the positions of its tokens."""
    mask = (torch.arange(8) >= PADS[:, None]).long()
    return tokens(3, 8, seed=9) * mask, mask, (mask.cumsum(-1) - 1).clamp_min(0)


@every_taper
@pytest.mark.parametrize("name", ["stock", "scaled by layer", "upcast"])
@torch.no_grad()
def test_left_padding_changes_no_logit(options, name):
    ids, mask, positions = padded()
    for form, (model, judge) in forms(options, **CONFIGS[name]).items():
        batch = model(ids, attention_mask=mask, position_ids=positions).logits
        assert close(batch, judge(ids, attention_mask=mask, position_ids=positions).logits, tolerance(name)), form
        for row, pads in enumerate(PADS.tolist()):
            alone = model(ids[row : row + 1, pads:]).logits[0]
            assert close(batch[row, pads:], alone, tolerance(name)), form
        assert not close(model(ids, position_ids=positions).logits[1, 2:], batch[1, 2:], 1e-3), form  # the mask matters


@every_taper
@torch.no_grad()
def test_cached_logits_equal_uncached_ones_at_every_split(options):
    ids, mask, positions = padded()
    for form, (model, judge) in forms(options).items():
        whole = judge(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for split in range(1, 8):
            first = model(ids[:, :split], attention_mask=mask[:, :split], position_ids=positions[:, :split])
            second = model(
                ids[:, split:], attention_mask=mask, position_ids=positions[:, split:], cache=first.cache
            ).logits
            joined = torch.cat([first.logits, second], 1)
            for row, pads in enumerate(PADS.tolist()):
                assert close(joined[row, pads:], whole[row, pads:]), (form, split)


@every_taper
@pytest.mark.parametrize("g", [1.0, 0.37, 0.0])
def test_gradient_checkpointing_changes_no_gradient_and_no_statistic(options, g):
    _, model, driver = gated(options, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    driver.set_gate(g)
    found = []
    for checkpointing in (False, True):
        judged = copy.deepcopy(model).train()
        if checkpointing:
            judged.activation_checkpointing_enable()
        with taper_of(judged).observe():
            logits_of(judged, tokens()).square().sum().backward()
        gradients = {name: p.grad for name, p in judged.named_parameters() if p.grad is not None}
        states = taper_of(judged).state_dict()
        found.append((gradients, {k: v for k, v in states.items() if "ema" in k}))
    (plain, means), (checkpointed, same_means) = found
    assert plain.keys() == checkpointed.keys()
    assert all(close(plain[name], checkpointed[name]) for name in plain)
    assert all(close(means[name], same_means[name]) for name in means)
    assert (g == 1.0 and options.get("sites") is None) <= any(value.any() for value in means.values())


# Weights from elsewhere


def write(folder, **overrides):
    """A folder of transformers' own format; the model in it."""
    model = gpt2(dtype=torch.float32, **overrides)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_transformers_is_loaded_as_it_is(tmp_path, tied):
    model = write(tmp_path, tie_word_embeddings=tied, layer_norm_epsilon=0.01)
    for source in (tmp_path, str(tmp_path)):
        loaded = load_base(source)
        assert not loaded.training
        assert snapshot(loaded.state_dict()) == snapshot(model.state_dict())
        assert has_tied_head(loaded) == tied
        assert torch.equal(logits_of(loaded, tokens()), logits_of(model, tokens()))


def test_a_folder_of_ours_is_loaded_by_the_same_call(tmp_path):
    model = gpt2(dtype=torch.float32)
    store.save(model, tmp_path)
    assert snapshot(load_base(tmp_path).state_dict()) == snapshot(model.state_dict())
    _, changed, _ = gated()
    store.save(changed.float(), tmp_path)
    with pytest.raises(UserError, match=r"transformer\.h\.0\.ln_1 is a TaperLayerNorm: give an untouched GPT-2"):
        load_base(tmp_path)
    store.save(builders.decoder(dtype=torch.float32), tmp_path)
    with pytest.raises(UserError, match="holds a Decoder, and a GPT2LMHeadModel is needed here"):
        load_base(tmp_path)


@pytest.mark.parametrize("absent", ["gpt2-tapernorm-test", "no/such/folder", "./none", "/none/at/all"])
def test_what_is_neither_a_folder_nor_on_the_hub_is_named(monkeypatch, absent):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=rf"(?s)^no model '{absent}': .*a folder with"):
        load_base(absent)


def test_another_class_is_refused_by_name(tmp_path):
    write_model(tmp_path, "llama")
    with pytest.raises(UserError, match="holds a LlamaForCausalLM, and a GPT2LMHeadModel is needed here"):
        load_base(tmp_path)


def test_the_published_form_of_fakeln_is_loaded_and_known(tmp_path):
    """eps 1e12 and gamma 1e6 / sigma_bar: what their export does to a model without norms."""
    model = gpt2()
    judge, bars = copy.deepcopy(model), builders.uniform(5, seed=4)
    for bar, name in zip(bars, [*INTERNAL, FINAL], strict=True):
        norm = model.get_submodule(name)
        judge.set_submodule(name, Frozen(norm, bar))
        norm.eps = 1e12
        norm.weight.data.mul_(1e6 / bar)
    model.config.layer_norm_epsilon = 1e12
    model.save_pretrained(tmp_path)
    loaded = load_base(tmp_path).double()
    assert is_disarmed(loaded.config)
    assert not is_disarmed(gpt2_config())
    assert close(logits_of(loaded, tokens()), logits_of(judge, tokens()), 1e-4)  # saved in float64, read in float32
    assert not close(logits_of(loaded, tokens()), logits_of(gpt2(), tokens()), 1e-2)


class Frozen(nn.Module):
    def __init__(self, norm, sigma):
        super().__init__()
        self.gamma, self.beta, self.sigma = norm.weight.detach().clone(), norm.bias, sigma

    def forward(self, h):
        return (h - h.mean(-1, keepdim=True)) / self.sigma * self.gamma + self.beta


# Fresh weights

SHAPE = Gpt2Shape(d_model=48, n_layer=3, n_head=4, dropout=0.25, norm_eps=1e-4)


def make(seed=0):
    return fresh(SHAPE, vocab_size=101, context=17, generator=generator(seed, "init"))


def test_a_fresh_model_has_the_shape_that_was_asked_for():
    model = make()
    config = model.config
    assert (config.n_embd, config.n_layer, config.n_head, config.n_positions, config.vocab_size) == (48, 3, 4, 17, 101)
    assert (config.n_inner, config.layer_norm_epsilon, model.transformer.ln_f.eps) == (None, 1e-4, 1e-4)
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.25}
    assert has_tied_head(model)
    assert logits_of(model, tokens(time=17)).shape == (4, 17, 101)


def test_fresh_weights_follow_the_papers_initialisation():
    for name, parameter in make().named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (1.0 if name.endswith("weight") else 0.0)).all(), name
        else:
            expected = 0.02 / 6**0.5 if name.endswith("c_proj.weight") else 0.02
            spread, mean, sample = parameter.std().item(), parameter.mean().item(), parameter.numel()
            assert spread == pytest.approx(expected, abs=5 * expected / (2 * sample) ** 0.5), name
            assert abs(mean) < 5 * expected / sample**0.5, name


def test_fresh_weights_depend_on_the_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert snapshot(make().state_dict()) == snapshot(first.state_dict())
    assert snapshot(make(seed=1).state_dict()) != snapshot(first.state_dict())
    spread = {name: p.std().item() for name, p in transformers.GPT2LMHeadModel(first.config).named_parameters()}
    for name, parameter in first.named_parameters():  # stock has the same scheme, not the same draws
        assert parameter.std().item() == pytest.approx(spread[name], rel=0.2, abs=0), name
