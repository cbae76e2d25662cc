"""Where a pass leaves the finite numbers, against passes that are known to break at one place."""

import math

import pytest
import torch
from builders import decoder, snapshot, tokens
from mixed import close_gate
from tiny_models import tiny

from tapernorm.norms import TaperNorm
from tapernorm_lab.training.find_overflow import find_overflow

PLACES = ("model.embed_tokens", "model.layers.1.self_attn.v_proj", "model.layers.0.mlp.up_proj", "lm_head")
MARKED = 7


@pytest.mark.parametrize("place", PLACES)
def test_the_module_with_the_infinite_weight_is_named(place):
    model = decoder(dtype=torch.float32)
    with torch.no_grad():
        model.get_submodule(place).weight.fill_(math.inf)
    found = find_overflow(model, tokens())
    assert (found.module, found.growth) == (place, None)
    assert str(found) == f"the first value that is not finite came out of {place}"


def test_a_sum_between_modules_is_laid_to_the_block_that_makes_it_and_not_to_what_reads_it():
    model = decoder(dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(3e38)
    model.model.layers[0].self_attn.register_forward_hook(lambda _, __, output: torch.full_like(output, 3e38))
    assert find_overflow(model, tokens()).module == "model.layers.0"


def outlying(factor, name="llama"):
    """A tapered model in which one token of one row is `factor` times as large as the others, and its rows."""
    model = tiny(name, dtype=torch.float32)
    taper = close_gate(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[MARKED] *= factor
    rows = torch.where(tokens(4, 9) == MARKED, 3, tokens(4, 9))
    rows[2, 5] = MARKED
    return model, taper, rows


def test_an_outlier_is_followed_from_the_norm_that_lets_it_out_to_where_it_overflows():
    model, _, rows = outlying(1e12)
    found = find_overflow(model, rows)
    norm = model.model.layers[0].input_layernorm
    h = model.model.embed_tokens.weight[MARKED].double()
    factor = norm.c.item() * (h.square().mean() + norm.variance_epsilon).sqrt().item()
    assert found.growth.norm == "model.layers.0.input_layernorm"
    assert found.growth.position == 5
    assert found.growth.factor == pytest.approx(factor, rel=1e-5)
    assert found.module.startswith("model.layers.")
    assert str(found) == (
        f"the first value that is not finite came out of {found.module}, after model.layers.0.input_layernorm let out "
        f"the token at position 5 {factor:.3g} times too large"
    )


def test_a_position_is_that_in_the_row_where_a_model_lays_all_tokens_end_to_end():
    model, _, rows = outlying(1e12, "opt, untied and without biases")
    with torch.no_grad():
        model.lm_head.weight.fill_(math.inf)
        model.model.decoder.layers[0].self_attn_layer_norm.c.fill_(1e-20)  # the norm after it reads (B T, D)
    found = find_overflow(model, rows)
    assert (found.growth.norm, found.growth.position) == ("model.decoder.layers.0.final_layer_norm", 5)


def test_the_same_token_passes_where_the_norms_still_work():
    """The control: at g = 1 the pass is finite, and so it is at g = 0 without the token."""
    model, taper, rows = outlying(1e12)
    assert find_overflow(model, torch.where(rows == MARKED, 3, rows)) is None
    taper.set_gate(1.0)
    assert find_overflow(model, rows) is None


@pytest.mark.parametrize(("g", "times", "blamed"), [(0.37, 12.0, False), (0.37, 16.0, True), (0.0, 12.0, True)])
def test_while_the_gate_is_open_the_norms_own_share_counts(g, times, blamed):
    """c * s = 12 is too large, and 0.37 + 0.63 * 12 = 7.9 is not: at this gate the norm still does much of its work."""
    model, taper, rows = outlying(1e3)
    taper.set_gate(g)
    first, *others = (module for module in model.modules() if isinstance(module, TaperNorm))
    h = model.model.embed_tokens.weight[MARKED].detach()
    s = (h.double().square().mean() + first.variance_epsilon).sqrt().item()
    with torch.no_grad():
        first.c.fill_(times / s)
        first.gamma_t.copy_(first.weight)
        for norm in others:
            norm.c.fill_(1e-20)
        model.lm_head.weight.fill_(math.inf)
        lets_out = (first(h).norm() / (first.weight * h / s).norm()).item()
    assert lets_out == pytest.approx(g + (1 - g) * times, rel=1e-5)
    growth = find_overflow(model, rows).growth
    assert (growth is not None) == blamed
    if growth is not None:
        assert (growth.norm, growth.position) == ("model.layers.0.input_layernorm", 5)
        assert growth.factor == pytest.approx(lets_out, rel=1e-5)


def test_looking_changes_nothing():
    model, taper, rows = outlying(1e12)
    model.train()
    before = snapshot(model.state_dict()) | snapshot(taper.state_dict())
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    find_overflow(model, rows)
    assert snapshot(model.state_dict()) | snapshot(taper.state_dict()) == before
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert all(parameter.grad is None for parameter in model.parameters())
