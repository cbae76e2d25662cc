"""Folding in float64 against the reference; its report; bf16; what is left to run."""

import copy
import json
from collections import Counter
from dataclasses import replace

import builders
import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from builders import KINDS, NORMS, array, close, decoder, normal, snapshot, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed import ROW, Mixed, close_gate
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from tapernorm import folding
from tapernorm.architectures import ARCHITECTURES, architecture_of
from tapernorm.folding import fold
from tapernorm.models.decoder import Decoder
from tapernorm.norms import FixedScale, Gate, LayerNorm, LinearForm, RMSNorm, TaperNorm
from tapernorm.scale_loss import ScaleProbe
from tapernorm.taper import attach, taper_of
from tapernorm.util.errors import UserError
from tapernorm.util.rng import generator

TAPERS = {
    "internal": {},
    "all": {"final": True},
    "final alone": {"final": True, "sites": []},
    "two sites": {"sites": ["*.1.input_layernorm", "*.0.post*"]},
}
FORMS = {"unfused": False, "fused": True}
BLOCK = "model.layers.1"
ATTENTION = tuple(f"{BLOCK}.self_attn.{name}_proj" for name in "qkv")
FEED_FORWARD = tuple(f"{BLOCK}.mlp.{name}_proj" for name in ("gate", "up"))

every_norm = pytest.mark.parametrize("norm", NORMS)
every_form = pytest.mark.parametrize("fused", FORMS.values(), ids=FORMS)
every_taper = pytest.mark.parametrize("options", TAPERS.values(), ids=TAPERS)


@pytest.fixture
def mixed_is_known(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "Mixed", ROW)


def gated(options=None, **shape):
    """A float64 decoder at g = 0, none of whose gains, scales and biases is 1, and its taper."""
    model = decoder(**shape)
    return model, close_gate(model, **(options or {}))


def consumers_of(model):
    """(norm, name of a linear map that it feeds), for all tapered norms."""
    arch = architecture_of(model)
    tapered = [name for name, module in model.named_modules() if isinstance(module, TaperNorm)]
    return [(model.get_submodule(name), consumer) for name in tapered for consumer in arch.consumers(name)]


# The same function


@every_norm
@every_taper
@every_form
def test_the_folded_decoder_is_the_gated_one_at_gate_zero(norm, options, fused):
    model, _ = gated(options, norm=norm)
    expected = model(tokens())
    folded, report = fold(model, fused=fused)
    assert close(folded(tokens()), expected)
    assert report.largest_logit_difference <= 1e-12 * expected.abs().max()
    left = FixedScale if not fused else nn.Identity
    assert all(type(folded.get_submodule(entry.name)) is left for entry in report.norms)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie_head", [False, True])
@pytest.mark.parametrize("options", [{}, {"final": True}, {"sites": ["*.1.ln_1"]}], ids=["internal", "all", "one site"])
@every_form
@pytest.mark.usefixtures("mixed_is_known")
def test_another_architecture_needs_one_row_of_the_table(kind, tie_head, options, fused):
    model = Mixed(kind, tie_head=tie_head)
    close_gate(model, **options)
    expected = model(tokens())
    assert close(fold(model, fused=fused)[0](tokens()), expected)


def test_an_architecture_outside_the_table_is_refused():
    with pytest.raises(UserError, match=r"no architecture 'Mixed' in tapernorm\.architectures; known: .*Decoder"):
        fold(Mixed())


# Its weights


@every_norm
def test_a_fixed_scale_holds_c_gamma_t_and_beta(norm):
    model, _ = gated({"final": True}, norm=norm)
    folded, report = fold(model, fused=False)
    for entry in report.norms:
        tapered, scale = model.get_submodule(entry.name), folded.get_submodule(entry.name)
        assert close(scale.weight, tapered.c.item() * array(tapered.gamma_t), 1e-15)
        assert scale.centre == (norm == "layernorm")
        assert (scale.bias is None) == (norm == "rmsnorm")
        assert scale.bias is None or torch.equal(scale.bias, tapered.bias)


# Wrong folds, which the comparison above must notice


def test_the_report_tells_a_wrong_fold(monkeypatch):
    model, _ = gated()
    scale = model(tokens()).abs().max().item()
    assert fold(model)[1].largest_logit_difference < 1e-12 * scale
    monkeypatch.setattr(folding, "_fold_into", lambda layer, norm: None)
    assert fold(model)[1].largest_logit_difference > 0.1 * scale


# The tied head


@every_norm
@every_form
@every_taper
def test_a_tied_head_is_untied_only_where_something_folds_into_it(norm, fused, options):
    model, _ = gated(options, norm=norm, tie_head=True)
    embedding = model.model.embed_tokens.weight.clone()
    folded, report = fold(model, fused=fused)
    into_head = fused and "final" in options
    assert report.head_untied == into_head
    assert folded.config == replace(model.config, tie_head=not into_head)
    assert torch.equal(folded.model.embed_tokens.weight, embedding)
    assert (folded.lm_head.weight is folded.model.embed_tokens.weight) == (not into_head)
    assert torch.equal(folded.lm_head.weight, embedding) == (not into_head)


@pytest.mark.usefixtures("mixed_is_known")
def test_whatever_shares_a_folded_weight_keeps_it():
    model = Mixed("rmsnorm")
    model.embed.weight = model.blocks[1].gate.weight  # (30, 30), tied to an inner map
    close_gate(model)
    before = model.embed.weight.clone()
    folded, report = fold(model)
    assert close(folded(tokens()), model(tokens()))
    assert torch.equal(folded.embed.weight, before)
    assert not report.head_untied


# Purity


def hooks_of(model):
    return [
        (name, hook)
        for name, module in model.named_modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    ]


@every_norm
@every_form
@pytest.mark.parametrize("final", [False, True])
def test_the_original_stays_as_it_was(norm, fused, final):
    options = {"anchor_weight": 0.1, "final": final, "model_options": {"norm": norm, "tie_head": True}}
    model, driver = builders.calibrated(**options)
    logits = {}
    for g in (1.0, 0.0):
        driver.set_gate(g)
        logits[g] = model(tokens()).clone()
    loss = driver.anchor_loss().item()
    passes = []
    model.model.register_forward_pre_hook(lambda module, _: passes.append(module is model.model))
    before = snapshot(model.state_dict()), snapshot(driver.state_dict()), model.config, hooks_of(model)
    identities = [(name, id(module)) for name, module in model.named_modules()]
    folded, _ = fold(model, fused=fused)
    assert not any(passes)  # not even run: the probe would hold another batch
    assert driver.anchor_loss().item() == loss
    assert (snapshot(model.state_dict()), snapshot(driver.state_dict()), model.config, hooks_of(model)) == before
    assert [(name, id(module)) for name, module in model.named_modules()] == identities
    with torch.no_grad():
        for parameter in folded.parameters():
            parameter.zero_()
    assert snapshot(model.state_dict()) == before[0]
    for g in (1.0, 0.0):
        driver.set_gate(g)
        assert torch.equal(model(tokens()), logits[g])
    assert passes.count(True) == 2


@every_form
@pytest.mark.parametrize("final", [False, True])
def test_the_copy_carries_nothing_of_a_taper(fused, final):
    model, _ = builders.calibrated(anchor_weight=0.1, final=final)
    model(tokens())
    folded, _ = fold(model, fused=fused)
    with pytest.raises(UserError, match="carries no taper"):
        taper_of(folded)
    assert not [m for m in folded.modules() if isinstance(m, TaperNorm | Gate | ScaleProbe)]
    assert hooks_of(folded) == []
    assert {key.rsplit(".", 1)[-1] for key in folded.state_dict()} <= {"weight", "bias"}


@pytest.mark.parametrize("training", [False, True])
def test_mode_dtype_and_trainability_are_kept(training):
    model, _ = builders.calibrated(dtype=torch.float32, final=True, model_options={"norm": "layernorm"})
    model.train(training).requires_grad_(False)
    for fused in FORMS.values():
        folded, _ = fold(model, fused=fused)
        assert all(module.training == training for module in folded.modules())
        assert {p.dtype for p in folded.parameters()} == {torch.float32}
        assert not [name for name, p in folded.named_parameters() if p.requires_grad]


@pytest.mark.usefixtures("mixed_is_known")
def test_dropout_does_not_blur_the_report():
    model = Mixed()
    model.ln_f.register_forward_pre_hook(lambda m, args: F.dropout(args[0], 0.5, m.training))
    model.blocks[0].register_forward_hook(lambda m, _, h: F.dropout(h, 0.5, m.training))
    close_gate(model)
    folded, report = fold(model.train())
    assert folded.training
    assert report.largest_logit_difference < 1e-12 * model.eval()(tokens()).abs().max()


# Refusals


@every_form
def test_folding_twice_is_refused(fused):
    for options in TAPERS.values():
        folded, _ = fold(gated(options)[0], fused=fused)
        with pytest.raises(UserError, match="folded already: fold the tapered model that it came from"):
            fold(folded, fused=fused)


@every_form
def test_what_cannot_be_folded_is_refused_with_the_remedy(fused):
    plain = decoder()
    with pytest.raises(UserError, match=r"attach\(model\)"):
        fold(plain, fused=fused)
    model = decoder()
    driver = attach(model)
    with pytest.raises(UserError, match=r"layers\.0\.input_layernorm is not calibrated: .* then calibrate\(\)"):
        fold(model, fused=fused)
    model, driver = gated()
    for g in (1.0, 0.37, 1e-9):
        driver.set_gate(g)
        with pytest.raises(UserError, match=rf"the gate is {g:g} .*Taper\.set_gate\(0\)"):
            fold(model, fused=fused)
    driver.set_gate(0.0)
    fold(model, fused=fused)


# The report


def test_every_number_of_the_report(monkeypatch):
    probe = tokens()
    monkeypatch.setattr(folding, "_probe_tokens", lambda _: probe)
    model, driver = builders.calibrated(dtype=torch.float32, final=True, model_options={"tie_head": True})
    folded, report = fold(model)
    assert report.fused
    assert report.head_untied
    assert [entry.name for entry in report.norms] == list(driver.swapped)
    assert [entry.c for entry in report.norms] == list(driver.constants.values())
    assert len({entry.c for entry in report.norms}) == 5
    feeds = {entry.name: entry.consumers for entry in report.norms}
    assert feeds[f"{BLOCK}.input_layernorm"] == ATTENTION
    assert feeds[f"{BLOCK}.post_attention_layernorm"] == FEED_FORWARD
    assert feeds["model.norm"] == ("lm_head",)
    for entry in report.norms:
        gains = array(model.get_submodule(entry.name).gamma_t) * entry.c
        assert (entry.coefficient_min, entry.coefficient_max) == (gains.min(), gains.max())
    difference = (array(folded(probe)) - array(model(probe))).__abs__().max()
    assert report.largest_logit_difference == pytest.approx(difference, rel=1e-6)
    assert difference > 0
    assert json.loads(json.dumps(report.as_dict()))["norms"][4]["consumers"] == ["lm_head"]


D, V, KV, FF = 12, 29, 4, 20
MATRICES = V * D + 2 * (2 * D * D + 2 * D * KV + 3 * D * FF)  # embedding; q, o; k, v; gate, up, down


@pytest.mark.parametrize(
    ("norm", "options", "tie_head", "fused", "before", "after"),
    [
        ("rmsnorm", {}, True, True, MATRICES + 9 * D, MATRICES + D),  # 4 of gamma and gamma_t, the final gamma
        ("rmsnorm", {}, True, False, MATRICES + 9 * D, MATRICES + 5 * D),
        ("rmsnorm", {"final": True}, True, True, MATRICES + 10 * D, MATRICES + V * D),
        ("rmsnorm", {"final": True}, True, False, MATRICES + 10 * D, MATRICES + 5 * D),
        ("rmsnorm", {"final": True}, False, True, MATRICES + V * D + 10 * D, MATRICES + V * D),
        ("layernorm", {"final": True}, False, False, MATRICES + V * D + 15 * D, MATRICES + V * D + 10 * D),
        (
            "layernorm",
            {"final": True},
            True,
            True,
            MATRICES + 15 * D,  # gamma, gamma_t, beta
            MATRICES + V * D + 2 * (D + 2 * KV + 2 * FF) + V,  # a bias in q, k, v, gate, up, and the head
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_and_bytes_are_counted_once(norm, options, tie_head, fused, before, after, dtype):
    shape = {"norm": norm, "tie_head": tie_head}
    model, _ = builders.calibrated(dtype=dtype, model_options=shape, **options)
    _, report = fold(model, fused=fused)
    assert (report.parameters_before, report.parameters_after) == (before, after)
    assert (report.bytes_before, report.bytes_after) == (before * dtype.itemsize, after * dtype.itemsize)


# bf16


def quality(logits, exact):
    """Distance to float64 (relative RMS), KL (nats/token) and share of equal top-1 tokens."""
    logits = logits.double()
    distance = (logits - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    divergence = F.kl_div(logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    agreement = (logits.argmax(-1) == exact.argmax(-1)).double().mean()
    return {"distance": distance.item(), "kl": divergence.mean().item(), "top1": agreement.item()}


def calibrated_bf16(norm, options):
    """A bf16 decoder of ordinary weights at g = 0, and the same numbers in float64."""
    model = Decoder(builders.shape(d_model=64, n_head=4, n_kv_head=2, d_ff=168, n_layer=4, context=32, norm=norm))
    random = generator(7, "tests")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.0 if "embed" in name else 0.5 * parameter.shape[1] ** -0.5, generator=random)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1, generator=random)
            else:
                parameter.uniform_(0.5, 1.5, generator=random)
    driver = attach(model, ema_rate=0.1, **options)
    builders.observe(model, driver, tokens(8, 32))
    driver.calibrate()
    driver.set_gate(0.0)
    model = model.to(torch.bfloat16).eval()
    return model, copy.deepcopy(model).double()


@every_norm
@pytest.mark.parametrize("options", [{}, {"final": True}], ids=["internal", "all"])
@torch.no_grad()
def test_in_bf16_the_folded_model_is_as_near_to_float64_as_the_gated_one(norm, options):
    model, exact = calibrated_bf16(norm, options)
    ids = tokens(16, 32, seed=6)
    truth = exact(ids)
    found = {"gated": quality(model(ids), truth)}
    found |= {form: quality(fold(model, fused=fused)[0](ids), truth) for form, fused in FORMS.items()}
    print(found)
    assert 1e-3 < found["gated"]["distance"] < 0.1, found
    for form in FORMS:
        assert found[form]["distance"] <= 1.5 * found["gated"]["distance"], found
        assert found[form]["kl"] <= 1.5 * found["gated"]["kl"], found
        assert found[form]["top1"] >= found["gated"]["top1"] - 0.03, found
    coarse, _ = fold(model)
    for name in [name for _, name in consumers_of(model)]:
        weight = coarse.get_submodule(name).weight
        weight.copy_(weight.to(torch.float8_e4m3fn))
    assert quality(coarse(ids), truth)["distance"] > 1.5 * found["gated"]["distance"]


@every_norm
@torch.no_grad()
def test_weights_are_rounded_once(norm):
    model, exact = calibrated_bf16(norm, {"final": True})
    folded, expected = fold(model)[0], fold(exact)[0]
    for tapered, name in consumers_of(model):
        weight, wide = folded.get_submodule(name).weight, expected.get_submodule(name).weight
        assert torch.equal(weight, wide.to(torch.bfloat16))
        narrow = model.get_submodule(name).weight * tapered.c.bfloat16() * tapered.gamma_t
        if isinstance(tapered, LayerNorm):
            narrow = narrow - narrow.mean(1, keepdim=True)
        assert (narrow.double() - wide).norm() > 1.1 * (weight.double() - wide).norm()


# Centring that cancels


def cancelled(width, mean, scale, seed):
    """What a folded map makes of tokens around `mean`, in float32 and exactly, and the bound of rounding theory."""
    coefficient, beta = normal(width, seed=seed), normal(width, seed=seed + 1)
    coefficient[:3] = torch.tensor([0.0, -1.3, 1e-9])
    h = (mean + scale * normal(31, width, seed=seed + 2)).float()
    h[0] = 0.0
    layer = nn.Linear(width, 17)
    layer.weight.data, layer.bias.data = normal(17, width, seed=seed + 3).float(), normal(17, seed=seed + 4).float()
    deviation = h.double() - h.double().mean(-1, keepdim=True)
    exact = (deviation * coefficient + beta) @ layer.weight.double().T + layer.bias.double()
    folding._fold_into(layer, LinearForm(coefficient, centre=True, bias=beta))
    unit = torch.finfo(torch.float32).eps / 2
    magnitudes = h.abs().double() @ layer.weight.abs().double().T + layer.bias.abs().double()
    return layer(h).double(), exact, (width + 3) * unit * magnitudes  # each weight rounded once, width + 1 sums


@given(
    width=st.integers(4, 96),
    mean=st.sampled_from([0.0, 1.0, -1e4]),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None, derandomize=True)
@torch.no_grad()
def test_in_float32_a_folded_centring_keeps_within_the_bound_of_its_sums(width, mean, scale, seed):
    found, exact, bound = cancelled(width, mean, scale, seed)
    assert ((found - exact).abs() <= bound).all()


def shifted(mean, *, dtype=torch.float32, norm="layernorm"):
    """A gated decoder whose tokens' embeddings lie around `mean`, an All-Taper."""
    model = decoder(norm=norm)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(mean)
    close_gate(model, final=True)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_over_sigma_of_every_norms_input_is_reported(dtype, monkeypatch):
    probe = tokens()
    monkeypatch.setattr(folding, "_probe_tokens", lambda _: probe)
    model = shifted(30.0, dtype=dtype)
    _, report = fold(model)
    seen = builders.inputs_of(model, [entry.name for entry in report.norms], probe)
    for entry in report.norms:
        h = seen[entry.name]
        ratios = np.abs(h.mean(-1)) / reference.sigma(h, 1e-5)[..., 0]
        assert entry.mean_to_sigma == pytest.approx(ratios.max(), rel=1e-4 if dtype is torch.float32 else 1e-12)
    assert [entry.mean_to_sigma for entry in fold(shifted(0.0, norm="rmsnorm"))[1].norms] == [None] * 5


@pytest.mark.parametrize(("mean", "warned"), [(0.0, False), (1.0, False), (1e4, True)])
@torch.no_grad()
def test_the_report_warns_where_folding_costs_digits_and_only_there(mean, warned):
    model = shifted(mean)
    exact = copy.deepcopy(model).double()(tokens())
    folded, report = fold(model)
    assert bool(report.warnings) == warned
    assert report.as_dict()["warnings"] == report.warnings
    assert close(folded(tokens()), exact, 1e-5) != warned
    ratio = max(entry.mean_to_sigma for entry in report.norms)
    assert close(folded(tokens()), exact, 1e-5 * (1 + ratio / folding.MEAN_TO_SIGMA))
    assert fold(model, fused=False)[1].warnings == ()
    if warned:
        assert "model.layers.0.input_layernorm reads tokens whose mean is up to" in report.warnings[0]
        assert json.loads(json.dumps(report.as_dict()))["warnings"] == list(report.warnings)


# What is left to run

STATISTICS = {
    *("mean", "var", "var_mean", "std", "sum", "pow", "square", "rsqrt", "sqrt", "reciprocal", "div"),
    *("norm", "linalg_vector_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "native_group_norm"),
}


def statistics_of(model):
    """How often each operation that a norm is made of stands in the traced graph."""
    graph = make_fx(model)(tokens()).graph
    names = Counter(str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("aten"))
    assert names["embedding"] == 1  # the whole model was seen
    return {name: count for name, count in names.items() if name in STATISTICS}


@torch.no_grad()
def traced(norm, fused, **options):
    model, driver = builders.calibrated(dtype=torch.float32, model_options={"norm": norm}, **options)
    folded, _ = fold(model, fused=fused)
    driver.set_gate(1.0)
    return statistics_of(model.eval()), statistics_of(folded.eval())


@every_norm
def test_the_fused_graph_holds_no_statistic_but_the_final_norms(norm):
    gated_graph, internal = traced(norm, fused=True)
    kind = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[norm]
    alone = statistics_of(nn.Sequential(nn.Embedding(29, 12), kind(12)).requires_grad_(False))
    assert alone
    assert internal == alone
    assert gated_graph == {name: 5 * count for name, count in alone.items()}
    _, nothing = traced(norm, fused=True, final=True)
    assert nothing == {}


@pytest.mark.parametrize(("norm", "expected"), [("rmsnorm", {}), ("layernorm", {"mean": 5})])
def test_the_unfused_graph_holds_a_mean_per_layer_norm_and_no_more(norm, expected):
    assert traced(norm, fused=False, final=True)[1] == expected
