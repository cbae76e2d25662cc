"""The decoder against transformers' LLaMA with the same weights, and against NumPy."""

import copy
import math
from dataclasses import replace
from functools import partial

import builders
import numpy as np
import pytest
import reference
import torch
import transformers
from builders import array, close, decoder, shape, tokens
from hugging_face import hugging_face

from tapernorm.models.decoder import Decoder, RotaryTable, lengthen, parameter_count
from tapernorm.util.rng import generator
from tapernorm_lab.config.sections import paper_d_ff

HEADS = {"grouped": 1, "two groups": 2, "multi-head": 4}
PAPER = {64: (168, 1.03), 128: (344, 2.86), 256: (680, 8.84), 512: (1368, 30.3)}  # width: (d_ff, millions)


def four_heads(**options):
    return shape(**{"d_model": 24, "n_head": 4, **options})


def in_float64(theirs, ours):
    """Their model with what float32 they hard-wire taken out: norms, and our table lent to their rotary embedding."""
    theirs = theirs.double()
    for name, module in list(theirs.named_modules()):
        if isinstance(module, transformers.models.llama.modeling_llama.LlamaRMSNorm):
            norm = torch.nn.RMSNorm(len(module.weight), eps=module.variance_epsilon, dtype=torch.float64)
            norm.load_state_dict(module.state_dict())
            theirs.set_submodule(name, norm)
    table = ours.model.layers[0].self_attn.rotary
    sin = table.sin[:, table.sin.shape[1] // 2 :].repeat(1, 2)  # our first half is negated
    theirs.model.rotary_emb.forward = lambda x, position_ids: (table.cos[position_ids], sin[position_ids])
    return theirs


def pair(n_kv_head, tie_head, dtype):
    config = four_heads(n_kv_head=n_kv_head, tie_head=tie_head)
    theirs, ours = hugging_face(config), Decoder(config)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs.to(dtype), ours.to(dtype)


# Against transformers


@pytest.mark.parametrize("n_kv_head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("tie_head", [False, True])
@torch.no_grad()
def test_loads_a_llama_strictly_and_gives_its_logits(n_kv_head, tie_head):
    theirs, ours = pair(n_kv_head, tie_head, torch.float32)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert parameter_count(ours) == theirs.num_parameters()
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tie_head
    exact = copy.deepcopy(ours).double()(tokens())
    batch = tokens()
    # The norms sum 24 squares, the products at most 24 terms, two blocks deep: some 100 roundings of 2^-24.
    assert close(ours(batch), theirs(batch).logits, 1e-5)
    assert close(ours(batch), exact, 1e-5)


@pytest.mark.parametrize("n_kv_head", HEADS.values(), ids=HEADS)
@torch.no_grad()
def test_in_float64_the_logits_agree_to_rounding(n_kv_head):
    theirs, ours = pair(n_kv_head, False, torch.float64)
    assert close(ours(tokens()), in_float64(theirs, ours)(tokens()).logits, 1e-12)


def swap_gate_and_up(model):
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def turn_backwards(model):
    model.model.layers[0].self_attn.rotary.sin.neg_()


def interleave_channels(model):
    rotary = model.model.layers[0].self_attn.rotary
    order = torch.arange(6).view(2, 3).T.flatten()
    rotary.cos.copy_(rotary.cos[:, order])
    rotary.sin.copy_(rotary.sin[:, order])


def shift_positions(model):
    rotary = model.model.layers[0].self_attn.rotary
    rotary.cos[1:] = rotary.cos[1:].flip(0)


def exchange_norms(model):
    block = model.model.layers[0]
    block.input_layernorm, block.post_attention_layernorm = block.post_attention_layernorm, block.input_layernorm


def other_key_head(model):
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight.copy_(attention.k_proj.weight.view(2, 6, 24).flip(0).flatten(0, 1))


@pytest.mark.parametrize(
    "damage",
    [swap_gate_and_up, turn_backwards, interleave_channels, shift_positions, exchange_norms, other_key_head],
)
@torch.no_grad()
def test_a_wrong_convention_shows(damage):
    theirs, ours = pair(2, False, torch.float32)
    damage(ours)
    assert not close(ours(tokens()), theirs(tokens()).logits, 1e-3)


# Against NumPy


def numpy_logits(model, ids, **options):
    return np.stack([builders.reference_decoder(model, row, **options) for row in ids])


@pytest.mark.parametrize("norm", builders.NORMS)
@pytest.mark.parametrize("n_kv_head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("tie_head", [False, True])
def test_agrees_with_the_reference_decoder(norm, n_kv_head, tie_head):
    model = decoder(d_model=24, n_head=4, norm=norm, n_kv_head=n_kv_head, tie_head=tie_head)
    rounded = numpy_logits(model, tokens())  # as our tables are
    assert close(model(tokens()), rounded, 1e-12)
    exact = numpy_logits(model, tokens(), dtype=np.float64)
    assert close(model(tokens()), exact, 1e-6)
    assert not close(model(tokens()), exact, 1e-12)


@pytest.mark.parametrize("norm", builders.NORMS)
@pytest.mark.parametrize("g", builders.GATES)
def test_a_tapered_decoder_agrees_with_the_reference_at_every_gate(norm, g):
    model, _ = builders.calibrated(g, final=True, model_options={"norm": norm})
    expected = numpy_logits(model, tokens())
    assert close(model(tokens()), expected, 1e-12)


@pytest.mark.parametrize("theta", [100.0, 10_000.0])
def test_rotary_tables_are_float64_angles_rounded_once(theta):
    table = RotaryTable(shape(context=600, rope_theta=theta))
    cos, sin = (t.astype(np.float32) for t in reference.rotary_tables(600, 4, theta))
    assert np.abs(array(table.cos) - np.concatenate([cos, cos], -1)).max() <= 2**-24  # the libraries' last digit
    assert np.abs(array(table.sin) - np.concatenate([-sin, sin], -1)).max() <= 2**-24
    angles = np.arange(600, dtype=np.float32)[:, None] * (theta ** -(np.arange(0, 4, 2) / 4)).astype(np.float32)
    assert np.abs(array(table.cos)[:, :2] - np.cos(angles)).max() > 2**-22  # angles in float32 are worse


def test_rotary_tables_survive_bfloat16():
    model = decoder(dtype=torch.float32)
    rotary = model.model.layers[0].self_attn.rotary
    cos = rotary.cos.clone()
    model.bfloat16()
    assert torch.equal(rotary.cos, cos)
    assert rotary is model.model.layers[1].self_attn.rotary


@pytest.mark.parametrize("norm", builders.NORMS)
def test_permuting_features_with_gains_and_weights_changes_nothing(norm):
    model, _ = builders.calibrated(0.37, final=True, model_options={"norm": norm})
    expected, order = model(tokens()), torch.randperm(12, generator=generator(1, "tests"))
    reads = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(parameter[order])
            elif any(word in name for word in reads):
                parameter.copy_(parameter[:, order])
            else:
                parameter.copy_(parameter[order])
    assert close(model(tokens()), expected)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.copy_(model.model.layers[0].input_layernorm.weight.roll(1))
    assert not close(model(tokens()), expected, 1e-3)


# Shape and size


def counted_by_formula(config):
    """V D + L (2 D^2 + 2 D K E + 3 D F + 2 D) + D, the tied head counted once."""
    D, F, kv = config.d_model, config.d_ff, config.n_kv_head * (config.d_model // config.n_head)
    return config.vocab_size * D + config.n_layer * (2 * D * D + 2 * D * kv + 3 * D * F + 2 * D) + D


@pytest.mark.parametrize(("d_model", "exact"), [(64, 1_030_208), (128, 2_863_232), (256, 8_839_424), (512, 30_327_296)])
def test_parameter_counts_of_the_paper_widths(d_model, exact):
    d_ff, millions = PAPER[d_model]
    sizes = {"n_layer": 8, "n_head": 16, "n_kv_head": 16, "context": 512, "rope_theta": 1e4, "tie_head": True}
    config = shape(d_model=d_model, d_ff=d_ff, vocab_size=10_000, **sizes)
    with torch.device("meta"):
        model = Decoder(config)
    assert paper_d_ff(d_model) == d_ff
    assert parameter_count(model) == counted_by_formula(config) == exact
    assert float(f"{exact / 1e6:.3g}") == millions
    expansion_four = counted_by_formula(replace(config, d_ff=4 * d_model))
    assert (round(expansion_four / 1e6) != round(millions)) == (
        d_model >= 256
    )  # 11M and 39M are no labels of the paper


def test_an_untied_head_is_counted_and_a_layer_norm_has_biases():
    tied, untied = (parameter_count(decoder(tie_head=tie)) for tie in (True, False))
    assert untied - tied == builders.VOCABULARY * 12
    assert parameter_count(decoder(norm="layernorm")) - parameter_count(decoder()) == 5 * 12


def test_initialisation_is_a_function_of_the_seed():
    first, same, other = (Decoder(shape()).initialize(generator(seed, "init")) for seed in (1, 1, 2))
    assert builders.snapshot(first.state_dict()) == builders.snapshot(same.state_dict())
    assert builders.snapshot(first.state_dict()) != builders.snapshot(other.state_dict())


@pytest.mark.parametrize("n_layer", [2, 5])
@pytest.mark.parametrize("tie_head", [False, True])
def test_initialisation_has_the_stated_spread(n_layer, tie_head):
    config = shape(vocab_size=700, d_model=90, n_layer=n_layer, d_ff=160, norm="layernorm", tie_head=tie_head)
    model = decoder(norm="layernorm")  # whatever was there before
    model = Decoder(config).initialize(generator(1, "init"))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            back = "o_proj" in name or "down_proj" in name
            spread = 0.02 / math.sqrt(2 * n_layer) if back else 0.02
            margin = 5 / math.sqrt(parameter.numel())  # seven standard errors of a standard deviation, five of a mean
            assert parameter.std().item() == pytest.approx(spread, rel=margin)
            assert abs(parameter.mean().item()) < spread * margin
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight"))))


def test_more_tokens_than_the_context_are_refused():
    model = decoder()
    assert model(tokens(1, 11)).shape == (1, 11, builders.VOCABULARY)
    with pytest.raises(ValueError, match="12 tokens exceed the context of 11"):
        model(tokens(1, 12))


@pytest.mark.parametrize("position", [1, 4, 6])
@torch.no_grad()
def test_a_changed_token_changes_no_earlier_logits_and_all_later_ones(position):
    model, batch = decoder(), tokens()
    changed = batch.clone()
    changed[:, position] = (changed[:, position] + 1) % builders.VOCABULARY
    before, after = model(batch), model(changed)
    assert torch.equal(before[:, :position], after[:, :position])
    moved = (before - after).abs().amax(-1)
    assert (moved[:, position:] > 1e-6).all()


def test_batch_rows_do_not_meet():
    model = decoder()
    alone = torch.cat([model(row[None]) for row in tokens()])
    assert close(model(tokens()), alone)


def test_the_gradient_of_the_logits_agrees_with_finite_differences():
    model = decoder(n_layer=1)
    apply = partial(torch.func.functional_call, model)
    name = "model.layers.0.self_attn.k_proj.weight"
    weight = dict(model.named_parameters())[name].detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: apply({name: w}, (tokens(1, 3),)).sum(-1), (weight,))


# Beyond its training context

SHORT, LONG = 11, 23  # tokens


def test_positions_beyond_the_context_turn_as_in_numpy():
    model = decoder(context=SHORT).eval()
    ids = tokens(1, LONG)
    with pytest.raises(ValueError, match="23 tokens exceed the context of 11"):
        model(ids)
    lengthen(model, LONG)
    with torch.no_grad():
        found = array(model(ids)[0])
    np.testing.assert_allclose(found, numpy_logits(model, ids)[0], rtol=0, atol=2e-6)
    held = np.minimum(np.arange(LONG), SHORT - 1)  # positions that stop at the last one trained on
    wrong = numpy_logits(model, ids, positions=held)[0]
    np.testing.assert_allclose(found[:SHORT], wrong[:SHORT], rtol=0, atol=2e-6)
    assert np.abs(found[SHORT:] - wrong[SHORT:]).max() > 0.01


def test_nothing_changes_at_the_positions_that_it_had():
    model = decoder(context=SHORT, dtype=torch.float32).eval()
    ids, weights = tokens(3, SHORT), builders.snapshot(model.state_dict())
    with torch.no_grad():
        before = model(ids)
        lengthen(model, LONG)
        assert torch.equal(model(ids), before)
    assert builders.snapshot(model.state_dict()) == weights
    assert model.config.context == LONG
    tables = {id(module) for module in model.modules() if isinstance(module, RotaryTable)}
    assert len(tables) == 1  # all layers share it
    with pytest.raises(ValueError, match=r"context .* 23, got 11"):
        lengthen(model, SHORT)
