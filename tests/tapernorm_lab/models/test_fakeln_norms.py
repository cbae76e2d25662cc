"""FakeLayerNorm and the c_attn behind it: forward, statistics, gradients, and the linear map that is left."""

import copy

import numpy as np
import pytest
import reference
import torch
from builders import array, close, normal, plain_norm, snapshot
from fakes import EPS, WIDTH, fake_norms, gpt2
from torch import nn
from transformers.pytorch_utils import Conv1D

from tapernorm.util.errors import UserError
from tapernorm_lab.models.fakeln_norms import (
    FakeLayerNorm,
    SplitConv1D,
    make_fake,
    restore_fake,
)

BIASES = ("layernorm", "layernorm without bias")
QK_BAR, V_BAR = 1.7, 0.6
LN_1, LN_2, LN_F = "transformer.h.1.ln_1", "transformer.h.1.ln_2", "transformer.ln_f"
C_ATTN = "transformer.h.1.attn.c_attn"


class Alone(nn.Module):
    """One norm of the given kind under the name `norm`."""

    def __init__(self, kind="layernorm", width=7, dtype=torch.float64):
        super().__init__()
        self.norm = plain_norm(kind, width, eps=EPS, dtype=dtype)


class Attention(nn.Module):
    """An ln_1 and its c_attn, under GPT-2's names."""

    def __init__(self, kind="layernorm", width=7, columns=3):
        super().__init__()
        self.ln_1 = plain_norm(kind, width, eps=EPS)
        self.attn = nn.Module()
        self.attn.c_attn = Conv1D(columns * width, width).double()
        with torch.no_grad():
            self.attn.c_attn.bias.copy_(normal(columns * width, seed=7))
            self.attn.c_attn.weight.copy_(normal(width, columns * width, seed=8))


def whole(kind="layernorm", width=7, **options):
    return make_fake(Alone(kind, width, **options), "norm")


def split(kind="layernorm", width=7):
    block = Attention(kind, width)
    return make_fake(block, "ln_1"), block.attn.c_attn


def freeze(norm, *sigma_bars, removed=None):
    """Set sigma_bars (NaN: not frozen) and remove what has one, or as told."""
    norm.sigma_bars.copy_(torch.tensor(sigma_bars, dtype=torch.float64))
    norm.removed = removed or tuple(bool(bar == bar) for bar in sigma_bars)
    return norm


def hidden(*shape, seed=2):
    """Hidden states whose scale differs from token to token, off-centre."""
    return normal(*shape, seed=seed) * (1 + 3 * normal(*shape[:-1], 1, seed=seed + 1).abs()) + 0.5


def expected(norm, h, sigma):
    beta = 0.0 if norm.bias is None else array(norm.bias)
    return reference.fake_layer_norm(array(h), sigma_bar=sigma, gamma=array(norm.weight), beta=beta)


# Forward


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("observing", [False, True])
def test_before_any_removal_output_and_gradients_are_bitwise_those_of_the_plain_norm(kind, parts, observing):
    plain = plain_norm(kind, 7, eps=EPS)
    norm = whole(kind) if parts == 1 else split(kind)[0]
    norm.observing = observing
    results = []
    for module in (plain, norm):
        h = hidden(2, 5, 7).requires_grad_()
        out = module(h)
        out.square().sum().backward()
        results.append([out, h.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", BIASES)
def test_a_removed_norm_divides_by_sigma_bar(kind):
    norm, h = freeze(whole(kind), QK_BAR), hidden(2, 5, 7)
    assert close(norm(h), expected(norm, h, QK_BAR))
    assert not close(norm(h), expected(norm, h, reference.sigma(array(h), EPS)), 1e-3)


def test_a_norm_without_bias_scales_like_one_with_a_bias_of_zeros():
    bare, zero, h = freeze(whole("layernorm without bias"), QK_BAR), freeze(whole(), QK_BAR), hidden(2, 5, 7)
    nn.init.zeros_(zero.bias)
    assert torch.equal(bare(h), zero(h))
    assert not close(bare(h), reference.centre(array(h)) * array(bare.weight), 1e-3)  # the scaling left out


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("removed", [(True, False), (False, True), (True, True)])
def test_the_two_halves_of_ln_1_are_normalised_each_in_its_own_way(kind, removed):
    norm, h = freeze(split(kind)[0], QK_BAR, V_BAR, removed=removed), hidden(2, 5, 7)
    sigma = reference.sigma(array(h), EPS)
    halves = [expected(norm, h, bar if gone else sigma) for gone, bar in zip(removed, (QK_BAR, V_BAR), strict=True)]
    assert close(norm(h), np.concatenate(halves, -1))
    assert not close(norm(h), np.concatenate(halves[::-1], -1), 1e-3)


@pytest.mark.parametrize("make", [lambda: freeze(whole(), QK_BAR), lambda: freeze(split()[0], QK_BAR, V_BAR)])
def test_a_removed_norm_is_affine_in_its_input(make):
    norm, a, b = make(), hidden(2, 5, 7), hidden(2, 5, 7, seed=9)
    assert close(norm(3 * a - 2 * b), 3 * norm(a) - 2 * norm(b))
    norm.removed = (False,) * len(norm.parts)
    assert not close(norm(3 * a - 2 * b), 3 * norm(a) - 2 * norm(b), 1e-3)


def test_permuting_the_features_with_their_gains_permutes_the_output_and_nothing_else():
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    norm, permuted, h = whole(), whole(), hidden(2, 5, 7)
    with torch.no_grad():
        permuted.weight.copy_(norm.weight[order])
        permuted.bias.copy_(norm.bias[order])
    for module, rows in ((norm, h), (permuted, h[..., order])):
        module.observing = True
        module(rows)
        module.statistics.update()
    assert close(permuted.statistics.value(), norm.statistics.value())
    assert norm.sigma_bars.shape == (1,)
    bar = norm.statistics.value().item()
    assert close(freeze(permuted, bar)(h[..., order]), freeze(norm, bar)(h)[..., order])
    assert not close(permuted(h), norm(h)[..., order], 1e-3)


def test_one_hot_position_enters_sigma_bar_as_one_token_and_no_other_token():
    norm, h = whole(), hidden(2, 5, 7)
    h[:, 0] *= 100
    norm.observing = True
    norm(h)
    norm.statistics.update()
    sigma = reference.sigma(array(h), EPS)
    assert close(norm.statistics.value(), np.array([sigma.mean()]))
    freeze(norm, norm.statistics.value().item())
    colder = h.clone()
    colder[:, 0] /= 100
    assert torch.equal(norm(h)[:, 1:], norm(colder)[:, 1:])


def test_gradients_are_those_of_the_fixed_map():
    norm, h, upstream = freeze(whole(), QK_BAR), hidden(2, 5, 7).requires_grad_(), normal(2, 5, 7, seed=6)
    norm(h).backward(upstream)
    u = array(upstream)
    assert close(h.grad, reference.centre(u * array(norm.weight)) / QK_BAR)  # centring is its own transpose
    assert close(norm.weight.grad, (u * reference.centre(array(h)) / QK_BAR).sum((0, 1)))
    assert close(norm.bias.grad, u.sum((0, 1)))
    norm.removed = (False,)
    real = torch.autograd.grad(norm(h), h, upstream)[0]
    assert not close(h.grad, real, 1e-3)


def test_a_constant_token_gives_finite_gradients_at_every_stage():
    for bars in ((torch.nan, torch.nan), (QK_BAR, torch.nan), (torch.nan, V_BAR), (QK_BAR, V_BAR)):
        norm, h = freeze(split()[0], *bars), hidden(2, 5, 7)
        h[0, 0] = 0.0
        h.requires_grad_()
        norm(h).square().sum().backward()
        assert all(g.isfinite().all() for g in (h.grad, norm.weight.grad, norm.bias.grad))
        assert norm.sigma_bars.grad is None


# c_attn


def test_q_and_k_read_the_first_half_and_v_the_second():
    _, layer = split()
    x = normal(2, 5, 14, seed=3)
    W, b, (first, second) = array(layer.weight), array(layer.bias), np.split(array(x), 2, -1)
    q, k, v = first @ W[:, :7] + b[:7], first @ W[:, 7:14] + b[7:14], second @ W[:, 14:] + b[14:]
    assert close(layer(x), np.concatenate([q, k, v], -1))
    swapped = torch.cat([x[..., 7:], x[..., :7]], -1)
    assert not close(layer(swapped), np.concatenate([q, k, v], -1), 1e-3)
    assert close(layer(x[:, 2:3]), np.concatenate([q, k, v], -1)[:, 2:3])  # a view of it


def test_an_input_of_the_ordinary_width_takes_the_plain_forward_bitwise():
    plain, (_, layer) = Attention().attn.c_attn, split()
    assert type(layer) is SplitConv1D
    for time in (1, 5):
        assert torch.equal(layer(normal(2, time, 7)), plain(normal(2, time, 7)))


def test_equal_halves_give_what_one_would():
    _, layer = split()
    x = normal(2, 5, 7)
    assert close(layer(torch.cat([x, x], -1)), layer(x))


# Statistics


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("observing", [False, True])
@pytest.mark.parametrize("bars", [(torch.nan, torch.nan), (QK_BAR, torch.nan), (QK_BAR, V_BAR)], ids=str)
def test_sigma_is_collected_in_training_while_observed_as_long_as_a_part_needs_it(training, observing, bars):
    norm, h = freeze(split()[0], *bars).train(training), hidden(2, 5, 7)
    norm.observing = observing
    norm(h)
    wanted = training and observing and not all(norm.removed)
    assert norm.statistics.count.item() == (10 if wanted else 0)
    assert close(norm.statistics.sums, np.array([reference.sigma(array(h), EPS).sum() if wanted else 0.0]))


def test_a_bfloat16_norm_keeps_statistics_and_sigma_bar_in_float32():
    norm, h = whole(dtype=torch.bfloat16), hidden(40, 50, 7).bfloat16()
    norm.observing = True
    norm(h)
    norm.statistics.update()
    assert norm.sigma_bars.dtype == norm.statistics.ema.dtype == torch.float32
    assert close(norm.statistics.value(), np.array([reference.sigma(array(h), EPS).mean()]), 1e-5)
    freeze(norm, 1.23456789)
    assert norm(h).dtype == torch.bfloat16
    wide = freeze(whole(), 1.23456789).float()
    wide.bfloat16()
    assert wide.sigma_bars.item() == pytest.approx(1.23456789, rel=1e-7)


# What is left to fold


@pytest.mark.parametrize("kind", BIASES)
def test_the_linear_form_of_a_removed_norm_is_its_forward(kind):
    norm, h = freeze(whole(kind), QK_BAR), hidden(2, 5, 7)
    form = norm.linear_form()
    beta = 0.0 if form.bias is None else array(form.bias)
    assert form.centre
    assert form.output_scale is None
    assert close(norm(h), reference.centre(array(h)) * array(form.coefficient) + beta)


@pytest.mark.parametrize("kind", BIASES)
def test_the_linear_form_of_ln_1_scales_the_columns_of_c_attn(kind):
    (norm, layer), h = split(kind), hidden(2, 5, 7)
    freeze(norm, QK_BAR, V_BAR)
    form = norm.linear_form(layer)
    W, scale = array(layer.weight), array(form.output_scale)
    beta = np.zeros(7) if form.bias is None else array(form.bias)
    merged = np.diag(array(form.coefficient)) @ W @ np.diag(scale)
    bias = array(layer.bias) + beta @ W
    assert close(layer(norm(h)), reference.centre(array(h)) @ merged + bias)
    everywhere_qk = np.diag(array(form.coefficient)) @ W / QK_BAR
    assert not close(layer(norm(h)), reference.centre(array(h)) @ everywhere_qk + bias, 1e-3)


@pytest.mark.parametrize("bars", [(torch.nan, torch.nan), (QK_BAR, torch.nan)], ids=str)
def test_a_norm_that_still_normalises_has_no_linear_form(bars):
    with pytest.raises(UserError, match="still normalises"):
        freeze(split()[0], *bars).linear_form()


# Swapping and restoring


@pytest.mark.parametrize("kind", BIASES)
def test_swapping_keeps_parameters_names_and_hooks(kind):
    model = Attention(kind)
    before = dict(model.named_parameters())
    calls = []
    model.ln_1.register_forward_hook(lambda *_: calls.append(1))
    norm = make_fake(model, "ln_1")
    norm(hidden(2, 5, 7))
    assert calls
    assert dict(model.named_parameters()) == before
    assert model.state_dict().keys() - before.keys() == {"ln_1.sigma_bars"}


def with_norm(norm):
    model = Alone()
    model.norm = norm
    return model


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (with_norm(nn.RMSNorm(7)), "norm", r"norm is RMSNorm.*plain LayerNorms with a gain"),
        (with_norm(nn.LayerNorm(7, elementwise_affine=False)), "norm", "plain LayerNorms with a gain"),
        (Attention(columns=2), "ln_1", r"ln_1 feeds Conv1D\(nf=14, nx=7\).*plain Conv1D of q, k and v"),
    ],
)
def test_what_has_no_fake_form_is_refused_and_stays(model, name, message):
    classes = [type(m) for m in model.modules()]
    with pytest.raises(UserError, match=message):
        make_fake(model, name)
    assert [type(m) for m in model.modules()] == classes


def test_a_fake_norm_is_not_made_fake_twice():
    model = Attention()
    make_fake(model, "ln_1")
    with pytest.raises(UserError, match="give it a fresh GPT-2"):
        make_fake(model, "ln_1")


def mixed_gpt2(seed=3):
    model = gpt2(seed=seed)
    freeze(make_fake(model, LN_1), QK_BAR, torch.nan)
    freeze(make_fake(model, LN_2), 0.9)
    freeze(make_fake(model, LN_F), torch.nan)
    return model


def test_a_fresh_model_takes_the_fake_norms_of_another():
    model, tokens = mixed_gpt2(), torch.arange(10).view(2, 5)
    fresh = gpt2(seed=4)
    restore_fake(fresh, {name: norm.sigma_bars for name, norm in fake_norms(model).items()})
    assert fresh.get_submodule(LN_1).sigma_bars.tolist() == pytest.approx([QK_BAR, torch.nan], nan_ok=True)
    fresh.load_state_dict(model.state_dict())
    assert {name: norm.removed for name, norm in fake_norms(fresh).items()} == {
        LN_1: (True, False),
        LN_2: (True,),
        LN_F: (False,),
    }
    assert snapshot(fresh.state_dict()) == snapshot(model.state_dict())
    assert torch.equal(fresh(tokens).logits, model(tokens).logits)
    plain = gpt2(seed=4)
    plain.load_state_dict(model.state_dict(), strict=False)
    assert not close(plain(tokens).logits, model(tokens).logits, 1e-3)


def test_a_wrong_number_of_sigma_bars_is_refused():
    with pytest.raises(UserError, match=r"ln_1 takes 2 sigma_bar, and \(1,\) were given"):
        restore_fake(gpt2(), {LN_1: torch.ones(1)})


def test_a_copy_freezes_by_itself():
    model = mixed_gpt2()
    copied = copy.deepcopy(model)
    assert type(copied.get_submodule(LN_1)) is FakeLayerNorm
    assert type(copied.get_submodule(C_ATTN)) is SplitConv1D
    freeze(copied.get_submodule(LN_1), 5.0, 6.0)
    assert model.get_submodule(LN_1).removed == (True, False)
    assert model.get_submodule(LN_1).sigma_bars[0].item() == QK_BAR


def test_every_size_of_these_models_differs():
    model = gpt2()
    assert len({WIDTH, model.config.n_inner, model.config.n_positions, model.config.vocab_size}) == 4
