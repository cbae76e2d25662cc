"""Buffers that are widened with their model and never narrowed."""

import copy

import pytest
import torch
from builders import normal
from torch import nn

from tapernorm.util.wide_buffers import WideBuffers


class Holder(WideBuffers):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("value", normal(3, dtype=torch.float32))
        self.register_buffer("whole", torch.arange(3))
        self.register_buffer("absent", None)


class PlainHolder(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("value", normal(3, dtype=torch.float32))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_narrower_dtype_reaches_the_parameters_and_spares_the_buffers(narrow):
    module = nn.Sequential(Holder()).to(narrow)[0]
    assert module.weight.dtype == narrow
    assert torch.equal(module.value, normal(3, dtype=torch.float32))
    assert torch.equal(module.whole, torch.arange(3))
    assert module.absent is None


def test_an_ordinary_module_rounds_its_buffer():
    assert not torch.equal(PlainHolder().bfloat16().float().value, normal(3, dtype=torch.float32))


def test_a_wider_dtype_widens_and_going_back_narrows_nothing():
    module = Holder().double()
    assert module.value.dtype == torch.float64
    module.value.copy_(normal(3))
    module.float()
    assert torch.equal(module.value, normal(3))
    assert module.weight.dtype == torch.float32


def test_the_buffers_follow_to_another_device_with_their_precision():
    module = Holder().to("meta", torch.bfloat16)
    assert (module.value.device.type, module.value.dtype) == ("meta", torch.float32)
    assert (module.weight.device.type, module.weight.dtype) == ("meta", torch.bfloat16)


def test_a_copy_owns_its_buffers():
    module = Holder()
    copied = copy.deepcopy(module).bfloat16()
    copied.value.zero_()
    assert torch.equal(module.value, normal(3, dtype=torch.float32))
