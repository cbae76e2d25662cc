"""int8 weights against float64 arithmetic on what they stand for, and decoding with them."""

import builders
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from builders import decoder, tokens
from torch import nn

from tapernorm.folding import fold
from tapernorm.models.decode import decode_step, generate, prefill
from tapernorm.models.decoder import Decoder
from tapernorm.models.kv_cache import KVCache
from tapernorm.models.packed_decoder import PackedDecoder
from tapernorm.models.packed_linear import Int8Linear, PackedLinear, quantise
from tapernorm.util.compiler import has_compiler
from tapernorm.util.errors import UserError
from tapernorm.util.rng import generator

BF16 = 2.0**-8  # half a unit in the last place of bfloat16, relative


def linear(inputs, outputs, *, bias=False, seed=0, dtype=torch.float32):
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(
            builders.normal(outputs, inputs, seed=seed) * builders.uniform(outputs, 1, seed=seed + 1) ** 4
        )
        if bias:
            layer.bias.copy_(builders.normal(outputs, seed=seed + 2))
    return layer


def rounded(array):
    return torch.from_numpy(array).to(torch.bfloat16).double().numpy()


def largest_error(layer, x, layers, *, per_tensor=False):
    """Of `layer`(x), in units of bfloat16's rounding of what float64 NumPy makes of the weights' int8 form."""
    weight = np.concatenate([one.weight.detach().double().numpy() for one in layers])
    bias = np.concatenate([np.zeros(len(one.weight)) if one.bias is None else one.bias.detach() for one in layers])
    scale = np.abs(weight).max(axis=1, keepdims=True) / 127
    scale = rounded(np.full_like(scale, scale.max()) if per_tensor else scale)
    q = np.clip(np.rint(weight / scale), -127, 127)
    inputs = rounded(x.double().numpy())
    expected = inputs @ (q * scale).T
    allowed = BF16 * np.abs(expected) + 1e-6 * (np.abs(inputs) @ np.abs(q * scale).T) + 1e-6 * np.abs(bias)
    return (np.abs(layer(x).double().numpy() - (expected + bias)) / allowed).max()


@pytest.mark.parametrize("inputs", [16, 24, 40, 88, 5])  # multiples of the kernel's 16, and not
@pytest.mark.parametrize("rows", [(1,), (2, 3), (7, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_int8_maps_are_their_weights_int8_form_up_to_bfloat16(inputs, rows, dtype):
    layers = [linear(inputs, outputs, bias=outputs == 13, seed=outputs, dtype=dtype) for outputs in (29, 13, 8)]
    x = builders.normal(*rows, inputs, seed=3, dtype=dtype)
    packed = Int8Linear(*layers)
    assert packed.weight.dtype is torch.int8
    assert packed(x).dtype is dtype
    assert packed(x).shape == (*rows, 50)
    assert largest_error(packed, x, layers) <= 1
    assert largest_error(packed, x, layers, per_tensor=True) > 1  # one scale for all is another map
    packed.scale[7] *= 1.02  # a wrong scale
    assert largest_error(packed, x, layers) > 1


@torch.no_grad()
def test_a_scale_for_each_channel_costs_less_than_one_for_all():
    weight = linear(64, 40).weight.double()
    q, scale = quantise(weight)
    assert q.dtype is torch.int8
    assert scale.dtype is torch.bfloat16
    assert q.abs().amax(dim=1).min() >= 126  # each channel uses its range
    steps = scale.double()[:, None]
    error = (q * steps - weight).abs()
    assert (error <= 1.0 * steps).all()
    assert (error.mean(dim=1) < 0.3 * steps[:, 0]).all()  # uniform rounding: a quarter
    coarse = weight.abs().max() / 127
    assert (error**2).mean() < 0.25 * (((weight / coarse).round() * coarse - weight) ** 2).mean()


def test_a_channel_of_zeros_stays_zero_and_one_that_is_not_finite_is_refused():
    layer = linear(16, 4)
    with torch.no_grad():
        layer.weight[1] = 0
    assert torch.equal(Int8Linear(layer)(torch.ones(1, 16))[:, 1], torch.zeros(1))
    with torch.no_grad():
        layer.weight[1, 3] = torch.inf
    with pytest.raises(UserError, match="finite weights"):
        Int8Linear(layer)
    with pytest.raises(UserError, match="CPU"):
        Int8Linear(nn.Linear(16, 4, device="meta"))


@torch.no_grad()
def test_scales_outlive_a_move_to_another_dtype():
    layer = linear(24, 8)
    packed, x = Int8Linear(layer), builders.normal(3, 24, seed=1, dtype=torch.float32)
    before = packed(x)
    moved = packed.double().float()
    assert moved.weight.dtype is torch.int8
    assert torch.equal(moved(x), before)


# --- float32 ---


@torch.no_grad()
def test_blocked_weights_give_what_plain_ones_give_and_follow_a_move():
    layer = nn.Linear(512, 640)
    before = layer.weight.clone()
    blocked = PackedLinear(layer)
    x = torch.randn(3, 512, generator=generator(0, "blocked"))
    assert blocked._blocked is not None  # oneDNN's layout, on every build of PyTorch for x86 and ARM
    assert torch.allclose(blocked(x), layer(x), rtol=0, atol=1e-5)
    blocked.weight.mul_(2)
    assert not torch.allclose(blocked(x), F.linear(x, blocked.weight, blocked.bias), rtol=0, atol=1e-2)  # frozen
    blocked.to(torch.float32)
    assert torch.allclose(blocked(x), F.linear(x, blocked.weight, blocked.bias), rtol=0, atol=1e-5)
    one = x[:1]
    assert blocked.weight.stride() == (1, 640)  # column by column, as one row reads it
    assert torch.allclose(
        blocked(one), F.linear(one.double(), blocked.weight.double(), layer.bias.double()).float(), rtol=0, atol=1e-5
    )
    small = nn.Linear(24, 40)
    assert PackedLinear(small)._blocked is None  # too small to gain
    assert PackedLinear(small).weight.data_ptr() == small.weight.data_ptr()
    assert torch.equal(layer.weight, before)
    assert layer.weight.is_contiguous()
    assert blocked.double()._blocked is None
    assert torch.equal(blocked(x.double()), F.linear(x.double(), blocked.weight, blocked.bias))


# --- the decoder ---


def forms():
    gated, _ = builders.calibrated(final=True)
    return {
        "baseline": decoder().requires_grad_(False),
        "tied": decoder(tie_head=True).requires_grad_(False),
        "gated": builders.calibrated()[0].requires_grad_(False),
        "unfused": fold(gated, fused=False)[0].requires_grad_(False),
        "fused": fold(gated)[0].requires_grad_(False),
    }


@torch.no_grad()
def replaced(model: Decoder, make) -> Decoder:
    """`model` with each of its linear maps made anew."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, make(module))
    return model


def stepwise(packed, ids, start=3):
    """Logits of each position from `start` on, one token at a time."""
    cache = KVCache.allocate(
        packed.config, batch=len(ids), capacity=ids.shape[1], dtype=torch.float64, device=torch.device("cpu")
    )
    found = [prefill(packed, ids[:, :start], cache)]
    found += [decode_step(packed, ids[:, t], cache, t) for t in range(start, ids.shape[1])]
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("form", list(forms()))
@torch.no_grad()
def test_int8_decoding_is_the_int8_model_at_every_position(form):
    model, ids = forms()[form], tokens(2, 9)
    exact = model(ids)[:, 2:]
    found = stepwise(PackedDecoder(model, weights="int8"), ids)
    expected = replaced(model, Int8Linear)(ids)[:, 2:]  # uncached, map by map
    scale = exact.square().mean().sqrt()
    assert ((found - expected).square().mean().sqrt() / scale) < 2e-3  # sums end elsewhere and round to bfloat16 apart
    assert 1e-3 < ((found - exact).square().mean().sqrt() / scale) < 0.15  # int8, and near the model
    broken = PackedDecoder(forms()[form], weights="int8")
    broken.get_submodule("blocks.0.qkv").get_parameter("scale").mul_(4)
    assert ((stepwise(broken, ids) - expected).square().mean().sqrt() / scale) > 0.05


def test_int8_greedy_text_is_that_of_the_int8_model_and_compiled_the_same():
    model, ids = decoder().requires_grad_(False), tokens(2, 5)
    packed = PackedDecoder(model, weights="int8")
    written = torch.stack(list(generate(packed, ids, new_tokens=5)), dim=1)
    whole, slow = ids, replaced(model, Int8Linear)
    with torch.no_grad():
        for _ in range(5):
            whole = torch.cat([whole, slow(whole)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(written, whole[:, 5:])
    if has_compiler(torch.device("cpu")):
        again = torch.stack(list(generate(packed, ids, new_tokens=5, compile=True)), dim=1)
        assert torch.equal(again, written)


def test_stored_weights_are_the_default_and_the_source_stays_as_it_was():
    model = decoder(tie_head=True)
    before = builders.snapshot(model.state_dict())
    assert isinstance(PackedDecoder(model).head, PackedLinear)
    packed = PackedDecoder(model, weights="int8")
    assert isinstance(packed.head, Int8Linear)
    assert packed.embed.weight is model.model.embed_tokens.weight  # looked up as it is
    assert builders.snapshot(model.state_dict()) == before
