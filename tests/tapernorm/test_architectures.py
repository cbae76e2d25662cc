"""Every class in the table: attached, folded and generating, judged by the stock model."""

import copy
from dataclasses import replace
from functools import partial

import builders
import numpy as np
import pytest
import reference
import torch
import transformers
from builders import array, close, snapshot, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed import close_gate
from tiny_models import CASES, OURS, ReferenceNorm, exact, gated, judge, tiny
from torch import nn

from tapernorm import folding
from tapernorm.architectures import ARCHITECTURES, architecture_of, has_tied_head, logits_of
from tapernorm.folding import fold
from tapernorm.norms import TaperNorm, gain_of, kind_of
from tapernorm.taper import attach
from tapernorm.util.errors import UserError

TAPERS = {"internal": {}, "all": {"final": True}}

every_case = pytest.mark.parametrize("name", CASES)  # of transformers
every_model = pytest.mark.parametrize("name", [*CASES, *OURS])
every_taper = pytest.mark.parametrize("options", TAPERS.values(), ids=TAPERS)


def test_every_row_of_the_table_has_a_case_here():
    assert {class_name for class_name, _ in CASES.values()} == ARCHITECTURES.keys() - {"Decoder"}


# Attaching


def trained(model, *, observed=None):
    """Logits, loss and gradients of one training pass with the same dropout masks."""
    model.train()
    torch.manual_seed(5)
    if observed is None:
        output = model(input_ids=tokens(), labels=tokens(), use_cache=False)
    else:
        with observed.observe():
            output = model(input_ids=tokens(), labels=tokens(), use_cache=False)
    output.loss.backward()
    return [output.logits, output.loss], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@every_case
@every_taper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_gate_one_logits_loss_and_gradients_move_by_no_bit(name, options, dtype):
    stock = tiny(name, dtype=dtype)
    model = copy.deepcopy(stock)
    driver = attach(model, **options)
    expected, gradients = trained(stock)
    found, own = trained(model, observed=driver)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert own.keys() == gradients.keys()  # gamma_t has none
    assert all(torch.equal(own[key], gradient) for key, gradient in gradients.items())
    driver.calibrate()  # something was observed
    driver.set_gate(0.5)
    assert not torch.equal(trained(model)[0][0], expected[0])


@every_model
@every_taper
def test_the_state_gains_gamma_t_and_c_and_keeps_the_rest_by_name_and_value(name, options):
    stock = tiny(name, dtype=torch.float32)
    model = copy.deepcopy(stock)
    driver = attach(model, **options)
    new = {f"{norm}.{part}" for norm in driver.swapped for part in ("gamma_t", "c")}
    assert model.state_dict().keys() == stock.state_dict().keys() | new
    assert snapshot(stock.state_dict()).items() <= snapshot(model.state_dict()).items()


def sites(blocks, *names):
    return [f"{blocks}.{i}.{name}" for i in range(2) for name in names]


LLAMA_NORMS = (sites("model.layers", "input_layernorm", "post_attention_layernorm"), "model.norm")
NORMS = {
    "gpt2": (sites("transformer.h", "ln_1", "ln_2"), "transformer.ln_f"),
    "gpt_neox": (
        sites("gpt_neox.layers", "input_layernorm", "post_attention_layernorm"),
        "gpt_neox.final_layer_norm",
    ),
    "opt": (
        sites("model.decoder.layers", "self_attn_layer_norm", "final_layer_norm"),
        "model.decoder.final_layer_norm",
    ),
    "phi": (sites("model.layers", "input_layernorm"), "model.final_layernorm"),
}
INSIDE = {  # what stays inside attention
    "qwen3": sites("model.layers", "self_attn.q_norm", "self_attn.k_norm"),
    "phi with norms of q and k": sites("model.layers", "self_attn.q_layernorm", "self_attn.k_layernorm"),
    "stablelm with norms of q and k": [  # three heads of q, one of k
        f"model.layers.{i}.self_attn.{norm}"
        for i in range(2)
        for norm in (*(f"q_layernorm.norms.{head}" for head in range(3)), "k_layernorm.norms.0")
    ],
}


@every_model
@every_taper
def test_the_named_norms_are_swapped_and_every_other_is_named_as_kept(name, options):
    model = tiny(name)
    driver = attach(model, **options)
    internal, final = next((norms for case, norms in NORMS.items() if name.startswith(case)), LLAMA_NORMS)
    assert list(driver.swapped) == [*internal, *([final] if options else [])]
    assert {n for n, m in model.named_modules() if isinstance(m, TaperNorm)} == set(driver.swapped)
    assert sorted(driver.kept) == sorted([*INSIDE.get(name, []), *([] if options else [final])])
    with_eps = {n for n, m in model.named_modules() if hasattr(m, "eps") or hasattr(m, "variance_epsilon")}
    assert with_eps == {*driver.swapped, *driver.kept}


@every_model
def test_gamma_t_starts_as_the_gain_that_the_class_applies(name):
    """Seen in what the norm does to a token of ones and minus ones, not read off its weight."""
    model = tiny(name)
    norms = {n: model.get_submodule(n) for n in architecture_of(model).norms(model)}
    h = torch.ones(len(norms[architecture_of(model).final].weight), dtype=torch.float64)
    h[::2] = -1
    applied = {}
    for n, norm in norms.items():
        shift = 0.0 if getattr(norm, "bias", None) is None else norm.bias
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        applied[n] = (norm(h) - shift) * h * (1 + eps) ** 0.5
    attach(model, final=True)
    for n, gain in applied.items():
        norm = model.get_submodule(n)
        assert close(norm.gamma_t, gain, 1e-6), n
        assert torch.equal(gain_of(norm), norm.gamma_t)
        assert close(norm.weight, gain, 1e-6) == (name != "gemma")


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt_neox"])
def test_statistics_and_constants_follow_the_reference(name):
    model = tiny(name)
    driver = attach(model, ema_rate=1.0)
    model.train()
    seen = builders.inputs_of(model, driver.swapped, tokens())
    with driver.observe():
        logits_of(model, tokens())
    with torch.no_grad():
        for n in driver.swapped:
            model.get_submodule(n).gamma_t.zero_()
    driver.calibrate()
    for n in driver.swapped:
        norm = model.get_submodule(n)
        judged = ReferenceNorm(norm)
        top, bottom = reference.calibration_means(seen[n], array(judged.gamma), judged.eps, layer_norm=judged.centre)
        assert norm.c.item() == pytest.approx(top / bottom, rel=1e-12)
        assert torch.equal(norm.gamma_t, judged.gamma)


@pytest.mark.parametrize(
    "class_name", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM", "BloomForCausalLM"]
)
def test_a_class_without_a_row_is_refused_with_the_list_of_those_that_have_one(class_name):
    kind = getattr(transformers, class_name)
    model = kind(kind.config_class(**{**CASES["mistral"][1], "pad_token_id": 0}))
    known = "known: Decoder, GPT2LMHeadModel, GPTNeoXForCausalLM, Gemma.*, Llama.*, Mistral.*, OPT.*, Phi.*, Qwen2"
    with pytest.raises(UserError, match=rf"no architecture '{class_name}' .*{known}"):
        attach(model)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "opt",
            {"do_layer_norm_before": False},
            r"OPTForCausalLM with do_layer_norm_before = False \(post-norm\) is not",
        ),
        ("opt", {"_remove_final_layer_norm": True}, "OPTForCausalLM with _remove_final_layer_norm is not supported"),
        ("opt", {"word_embed_proj_dim": 6}, "OPTForCausalLM with word_embed_proj_dim .* is not supported"),
        ("opt", {"layer_norm_elementwise_affine": False}, r"gain \(weight\)"),
        (
            "stablelm",
            {"use_parallel_residual": True},
            "StableLmForCausalLM with use_parallel_residual .* is not supported",
        ),
    ],
)
def test_a_variant_that_its_row_does_not_describe_is_refused(name, overrides, message):
    model = tiny(name, **overrides)
    before = snapshot(model.state_dict())
    with pytest.raises(UserError, match=message):
        attach(model)
    assert snapshot(model.state_dict()) == before


def anatomy(model):
    """Everything about a model but its numbers: classes, members, hooks, names in its state."""
    return [
        (name, type(module), sorted(module.__dict__), *(names(getattr(module, kind)) for kind in MEMBERS))
        for name, module in model.named_modules()
    ]


def names(members):
    """The names in their order, which a set has none of."""
    return sorted(members) if isinstance(members, set) else list(members)


MEMBERS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_non_persistent_buffers_set")


@every_model
@every_taper
def test_a_detached_model_is_the_stock_one_to_the_last_member(name, options):
    stock = tiny(name, dtype=torch.float32)
    model = copy.deepcopy(stock)
    driver = attach(model, anchor_weight=0.1, **options)
    assert anatomy(model) != anatomy(stock)
    logits_of(model, tokens())
    driver.detach()
    assert anatomy(model) == anatomy(stock)
    assert snapshot(model.state_dict()) == snapshot(stock.state_dict())
    assert torch.equal(logits_of(model, tokens()), logits_of(stock, tokens()))
    close_gate(model, **options)  # and may be attached again
    fold(model)


# Any gate, and the fold


@every_model
@every_taper
@pytest.mark.parametrize("g", [1.0, 0.37, 0.0])
def test_every_gate_computes_what_the_reference_norms_compute(name, options, g):
    stock, model, driver = gated(name, options=options)
    driver.set_gate(g)
    expected = logits_of(judge(stock, model, driver.swapped, driver.gate.item()), tokens())
    single = g > 0 and any("RMSNorm" in type(model.get_submodule(n)).__name__ for n in driver.swapped)
    assert close(logits_of(exact(model), tokens()), expected, 1e-5 if single else 1e-12)
    assert close(logits_of(exact(stock), tokens()), expected, 1e-2) == (g == 1)


@every_model
@every_taper
@pytest.mark.parametrize(("fused", "seed"), [(False, 6), (True, 6), (True, 7), (True, 8)])
def test_the_folded_model_is_the_reference_at_gate_zero(name, options, fused, seed):
    stock, model, driver = gated(name, options=options, seed=seed)
    expected = logits_of(judge(stock, model, driver.swapped, 0.0), tokens())
    folded, report = fold(model, fused=fused)
    assert close(logits_of(exact(folded), tokens()), expected)
    assert [entry.name for entry in report.norms] == list(driver.swapped)
    assert not [m for m in folded.modules() if isinstance(m, TaperNorm)]
    assert report.warnings == ()


@every_model
def test_every_map_that_a_norm_feeds_had_to_be_folded(name):
    """The fold undone in one map at a time."""
    _, model, driver = gated(name, options={"final": True})
    expected = logits_of(exact(model), tokens())
    arch = architecture_of(model)
    folded = exact(fold(model)[0])
    for consumer in [c for norm in driver.swapped for c in arch.consumers(norm)]:
        right = folded.get_submodule(consumer)
        folded.set_submodule(consumer, model.get_submodule(consumer))
        assert not close(logits_of(folded, tokens()), expected, 1e-3), consumer
        folded.set_submodule(consumer, right)
    assert close(logits_of(folded, tokens()), expected)


@every_model
def test_the_folded_weights_are_those_of_the_reference(name):
    _, model, driver = gated(name, options={"final": True})
    folded, _ = fold(model)
    arch = architecture_of(model)
    for norm_name in driver.swapped:
        norm = model.get_submodule(norm_name)
        judged = ReferenceNorm(norm)
        for consumer in arch.consumers(norm_name):
            before, after = model.get_submodule(consumer), folded.get_submodule(consumer)
            turned = isinstance(before, nn.Linear)
            W = array(before.weight).T if turned else array(before.weight)
            b = np.zeros(W.shape[1]) if before.bias is None else array(before.bias)
            numbers = {"c": norm.c.item(), "gamma_t": array(norm.gamma_t)}
            if judged.centre:
                W, b = reference.fold_layer_norm(W, b, beta=array(judged.beta), **numbers)
            else:
                W = reference.fold_rms_norm(W, **numbers)
            assert close(array(after.weight).T if turned else after.weight, W), consumer
            assert (after.bias is None) == (before.bias is None and not judged.centre), consumer
            assert after.bias is None or close(after.bias, b), consumer


FAULTS = {
    "c omitted": {"c": False},
    "gain omitted": {"gain": False},
    "centring omitted": {"centre": False},
    "centred over the outputs": {"axis": 1},
    "beta not in the bias": {"beta": False},
    "folded into the outputs": {"transposed": True},
}
OF_LAYER_NORMS = ("centre", "axis", "beta")


def fold_into(layer, form, *, c=True, gain=True, centre=True, axis=0, beta=True, transposed=False):
    """The fold into one map spelt out once more, right or with one fault."""
    weight = folding.weight64(layer)
    coefficient = form.coefficient if gain else form.coefficient.mean().expand(len(weight))
    coefficient = coefficient if c else 1.3 * coefficient
    scaled = coefficient * weight if transposed else coefficient[:, None] * weight
    if form.centre and centre:
        scaled = scaled - scaled.mean(axis, keepdim=True)
    folding.replace(layer, scaled, form.bias @ weight if form.bias is not None and beta else None)


@every_model
def test_a_wrong_fold_is_noticed(name, monkeypatch):
    stock, model, driver = gated(name)
    expected = logits_of(judge(stock, model, driver.swapped, 0.0), tokens())
    rms = not kind_of(stock.get_submodule(driver.swapped[0])).centres
    needless = {*(OF_LAYER_NORMS if rms else ()), *(() if "square" in name else ("transposed",))}
    for fault in ({}, *(fault for fault in FAULTS.values() if not {*fault} & needless)):
        monkeypatch.setattr(folding, "_fold_into", partial(fold_into, **fault))
        found = logits_of(exact(fold(model)[0]), tokens())
        assert close(found, expected) if not fault else not close(found, expected, 1e-3), fault


def test_a_gain_guessed_from_the_values_would_be_noticed():
    """Gemma's weight may look like a gain, and a LLaMA's like a gain less 1: the class alone says which it is."""
    gemma, llama = tiny("gemma"), tiny("llama")
    with torch.no_grad():
        gemma.model.norm.weight.fill_(1.0)
        llama.model.norm.weight.fill_(0.0)
    for model in (gemma, llama):
        attach(model, final=True)
    assert torch.equal(gemma.model.norm.gamma_t, torch.full((12,), 2.0, dtype=torch.float64))
    assert torch.equal(llama.model.norm.gamma_t, torch.zeros(12, dtype=torch.float64))


@st.composite
def models(draw):
    """Any size of any class; the gains of a norm among zero, negative and tiny ones, a token of zeros."""
    name = draw(st.sampled_from(["llama", "qwen2", "qwen3", "gemma", "gpt_neox", "phi", "stablelm"]))
    heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([4, 8]))
    groups = draw(st.sampled_from([n for n in (1, 2, 3) if heads % n == 0]))
    sizes = {
        "num_attention_heads": heads,
        "hidden_size": heads * head_dim,
        "intermediate_size": draw(st.integers(1, 17)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if name != "gpt_neox":
        sizes["num_key_value_heads"] = groups
    switch = {"llama": "attention_bias", "gpt_neox": "use_parallel_residual", "stablelm": "use_qkv_bias"}.get(name)
    return name, {**sizes, **({switch: draw(st.booleans())} if switch else {})}


@given(
    model=models(),
    final=st.booleans(),
    fused=st.booleans(),
    gain=st.sampled_from([0.0, -0.7, 1e-12, 1.0]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_shape_of_any_class_folds(model, final, fused, gain, seed):
    name, sizes = model
    _, made, driver = gated(name, seed=seed, options={"final": final}, **sizes)
    with torch.no_grad():
        made.get_input_embeddings().weight[3] = 0.0
        made.get_submodule(driver.swapped[0]).gamma_t[-1] = gain
    ids = tokens(2, 5, seed)
    ids[0, :2] = 3
    folded, _ = fold(made, fused=fused)
    expected = logits_of(exact(made), ids)
    assert expected.isfinite().all()
    assert close(logits_of(exact(folded), ids), expected)


# Whose consumers they are


@every_case
def test_a_row_that_names_other_maps_is_refused(name, monkeypatch):
    class_name, _ = CASES[name]
    row = ARCHITECTURES[class_name]
    norm, (first, *rest) = next(iter(row.internal.items()))
    _, model, _ = gated(name)
    another = next((consumers[0] for n, consumers in row.internal.items() if n != norm), "mlp.fc2")
    for named in (tuple(rest), (first, *rest, another)):
        monkeypatch.setitem(ARCHITECTURES, class_name, replace(row, internal={**row.internal, norm: named}))
        with pytest.raises(UserError, match=r"cannot fold .*(it feeds|that layer is shared)"):
            fold(model)


def test_neox_heads_keep_their_places():
    """Rows of query_key_value lie (head, q/k/v, channel): the fold treats every output alike, so any order would do."""
    _, model, driver = gated("gpt_neox")
    order = builders.normal(36, seed=3).argsort()
    turned = copy.deepcopy(model)
    for layer in turned.gpt_neox.layers:
        fused = layer.attention.query_key_value
        fused.weight.data, fused.bias.data = fused.weight.data[order], fused.bias.data[order]
    for i, norm_name in enumerate(n for n in driver.swapped if n.endswith("input_layernorm")):
        after = fold(model)[0].gpt_neox.layers[i].attention.query_key_value
        turned_after = fold(turned)[0].gpt_neox.layers[i].attention.query_key_value
        assert torch.equal(turned_after.weight, after.weight[order])
        assert torch.equal(turned_after.bias, after.bias[order])
        norm, before = model.get_submodule(norm_name), model.gpt_neox.layers[i].attention.query_key_value
        by_head, whole = (layer.weight.view(3, 3, 4, 12) for layer in (before, after))  # (head, q/k/v, channel, input)
        for head in range(3):
            for part in range(3):
                numbers = {"c": norm.c.item(), "gamma_t": array(norm.gamma_t), "beta": array(norm.bias)}
                expected, _ = reference.fold_layer_norm(array(by_head[head, part]).T, 0.0, **numbers)
                assert close(whole[head, part], expected.T)
    assert not close(logits_of(turned, tokens()), logits_of(model, tokens()), 1e-3)  # attention minds the order


def test_the_two_norms_of_a_parallel_block_are_folded_apart():
    _, model, _ = gated("gpt_neox")
    first, second = model.gpt_neox.layers[0].input_layernorm, model.gpt_neox.layers[0].post_attention_layernorm
    expected = logits_of(model, tokens())
    for swapped in (False, True):
        judged = copy.deepcopy(model)
        if swapped:
            judged.gpt_neox.layers[0].input_layernorm = copy.deepcopy(second)
            judged.gpt_neox.layers[0].post_attention_layernorm = copy.deepcopy(first)
            for norm in (judged.gpt_neox.layers[0].input_layernorm, judged.gpt_neox.layers[0].post_attention_layernorm):
                norm.gate = first.gate
        assert close(logits_of(fold(judged)[0], tokens()), expected) == (not swapped)


def test_projections_that_share_a_weight_are_folded_apart():
    model = tiny("llama")
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    first.k_proj.weight = first.v_proj.weight
    second.q_proj.weight = first.q_proj.weight
    second.o_proj.weight = first.q_proj.weight  # (12, 12): of an output map, which stays
    close_gate(model)
    before = second.o_proj.weight.clone()
    folded, _ = fold(model)
    assert close(logits_of(exact(folded), tokens()), logits_of(exact(model), tokens()))
    assert torch.equal(folded.model.layers[1].self_attn.o_proj.weight, before)


def test_a_projection_that_two_blocks_share_is_refused():
    model = tiny("llama")
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    with pytest.warns(UserWarning, match="q_proj is the same module as"):  # said before the training, too
        close_gate(model)
    with pytest.raises(UserError, match=r"into model\.layers\.0\.self_attn\.q_proj: that layer is shared, .*layers\.1"):
        fold(model)


# The head


@every_case
@pytest.mark.parametrize("tied", [False, True])
def test_an_untied_head_survives_the_way_through_a_folder(name, tied, tmp_path):
    stock, model, _ = gated(name, options={"final": True}, tie_word_embeddings=tied, dtype=torch.float32)
    embedding = copy.deepcopy(stock.get_input_embeddings().weight)
    assert has_tied_head(model) == tied
    folded, report = fold(model)
    assert report.head_untied == tied
    assert model.config.tie_word_embeddings == tied
    assert torch.equal(folded.get_input_embeddings().weight, embedding)
    assert not torch.equal(folded.lm_head.weight, embedding)
    type(folded).save_pretrained(folded, tmp_path)  # as who writes an export might
    again = type(folded).from_pretrained(tmp_path)
    assert again.config.tie_word_embeddings is False
    assert torch.equal(again.get_input_embeddings().weight, embedding)
    assert torch.equal(again.lm_head.weight, folded.lm_head.weight)


def test_a_config_that_still_ties_would_undo_it(tmp_path, monkeypatch):
    monkeypatch.setattr(folding, "untie", lambda _: None)
    _, model, _ = gated("qwen2", options={"final": True}, dtype=torch.float32)
    folded, _ = fold(model)
    folded.tie_weights()
    assert torch.equal(folded.lm_head.weight, model.get_input_embeddings().weight)


# Generation

PROMPT = tokens(3, 5, seed=8)
PADDED = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
GENERATE = {"attention_mask": PADDED, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
GENERATE |= {"output_logits": True, "return_dict_in_generate": True}
RESOLVED = 1e-3  # of the largest logit: gaps below that may fall either way in float32


def assert_same_generation(found, expected):
    """Tokens equal and logits close, row by row, as long as the two best logits were far enough apart."""
    length, compared = PROMPT.shape[1], 0
    for row in range(len(PROMPT)):
        for step, (own, theirs) in enumerate(zip(found.logits, expected.logits, strict=True)):
            scale = theirs[row].abs().max()
            assert (own[row] - theirs[row]).abs().max() <= 1e-4 * scale
            best, second = theirs[row].topk(2).values
            if best - second <= RESOLVED * scale:
                break
            assert found.sequences[row, length + step] == expected.sequences[row, length + step]
            compared += 1
    assert compared >= 9  # half of what there is


@every_case
@every_taper
@torch.no_grad()
def test_generation_is_that_of_the_unfolded_model(name, options):
    _, model, _ = gated(name, options=options, dtype=torch.float32)
    folded, _ = fold(model)
    expected = model.generate(PROMPT, use_cache=False, **GENERATE)
    for judged, use_cache in ((model, True), (folded, True), (folded, False)):
        assert_same_generation(judged.generate(PROMPT, use_cache=use_cache, **GENERATE), expected)
    alone = {**GENERATE, "attention_mask": PADDED[1:2, 2:]}
    row = folded.generate(PROMPT[1:2, 2:], **alone)
    for step, logits in enumerate(row.logits):
        if not torch.equal(row.sequences[0, 3 : 3 + step], expected.sequences[1, 5 : 5 + step]):
            break
        assert close(logits[0], expected.logits[step][1], 1e-4)


def test_the_window_of_mistral_is_shorter_than_the_prompt():
    assert tiny("mistral").config.sliding_window < PROMPT.shape[1]
