"""Both ways round that a layer stores W read alike and are written back alike."""

import subprocess
import sys

import builders
import pytest
import torch
from builders import close, normal
from torch import nn
from transformers.pytorch_utils import Conv1D

from tapernorm.linear_maps import give_bias, is_like_linear, is_linear, is_split, make_plain, replace, weight64
from tapernorm_lab.models.fakeln_norms import SplitConv1D

IN, OUT = 5, 15  # of a split map, OUT is three times IN


def linear(*, bias=True, dtype=torch.float64):
    layer = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    return filled(layer)


def conv1d(*, dtype=torch.float64):
    return filled(Conv1D(OUT, IN).to(dtype))


def split(*, dtype=torch.float64):
    layer = conv1d(dtype=dtype)
    layer.__class__ = SplitConv1D
    return layer


def filled(layer):
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed))
    return layer


MAPS = {"nn.Linear": linear, "Conv1D": conv1d, "split Conv1D": split}
every_map = pytest.mark.parametrize("make", MAPS.values(), ids=MAPS)


@every_map
def test_w_is_what_a_row_vector_is_multiplied_by(make):
    layer, x = make(), normal(4, IN, seed=9)
    assert weight64(layer).shape == (IN, OUT)
    assert close(layer(x), x @ weight64(layer) + layer.bias)
    assert not weight64(layer).requires_grad


@every_map
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_written_is_what_is_then_computed(make, dtype):
    layer = make(dtype=dtype)
    weight, shift, bias = normal(IN, OUT, seed=3), normal(OUT, seed=4), layer.bias.detach().double()
    shape = layer.weight.shape
    replace(layer, weight, shift)
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.is_contiguous()) == (shape, dtype, True)
    assert torch.equal(weight64(layer), weight.to(dtype).double())
    assert torch.equal(layer.bias, (bias + shift).to(dtype))  # summed in float64, cast once
    x = normal(4, IN, seed=9)
    assert close(layer.double()(x), x @ weight.to(dtype).double() + layer.bias)


@pytest.mark.parametrize("trained", [True, False])
def test_what_shares_the_old_weight_keeps_it_and_the_new_one_trains_as_it_did(trained):
    layer = linear().requires_grad_(trained)
    other = nn.Linear(IN, OUT)
    other.weight = layer.weight
    before = other.weight.clone()
    replace(layer, normal(IN, OUT, seed=3), normal(OUT))
    assert torch.equal(other.weight, before)
    assert not torch.equal(layer.weight, before)
    assert {p.requires_grad for p in layer.parameters()} == {trained}


def test_a_missing_bias_is_given_and_a_shift_becomes_one():
    layer = linear(bias=False, dtype=torch.float32)
    give_bias(layer)
    assert (layer.bias.shape, layer.bias.dtype, layer.bias.abs().sum().item()) == ((OUT,), torch.float32, 0)
    layer = linear(bias=False)
    replace(layer, weight64(layer), normal(OUT))
    assert torch.equal(layer.bias, normal(OUT))
    kept = conv1d()
    bias = kept.bias
    give_bias(kept)
    assert kept.bias is bias


class Derived(nn.Linear):
    pass


class DerivedConv(Conv1D):
    pass


def test_a_class_is_known_exactly_or_only_resembled():
    for make in MAPS.values():
        assert is_linear(make())
        assert is_like_linear(make())
    for derived in (Derived(IN, OUT), DerivedConv(OUT, IN)):
        assert not is_linear(derived)
        assert is_like_linear(derived)
    for other in (nn.Identity(), nn.Conv1d(IN, OUT, 1), nn.Bilinear(IN, IN, OUT), builders.plain_norm("layernorm", IN)):
        assert not is_linear(other)
        assert not is_like_linear(other)


def test_a_split_map_is_made_plain_in_place():
    layer = split()
    parameters = dict(layer.named_parameters())
    assert is_split(layer)
    make_plain(layer)
    assert type(layer) is Conv1D
    assert all(parameter is parameters[name] for name, parameter in layer.named_parameters())
    plain = linear()
    make_plain(plain)
    assert type(plain) is nn.Linear


def test_an_nn_linear_needs_no_transformers():
    script = (
        "import sys, torch; from tapernorm.linear_maps import is_linear, is_like_linear; "
        "layer = torch.nn.Linear(2, 3); "
        "assert is_linear(layer) and is_like_linear(layer) and not is_linear(torch.nn.Identity()); "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
