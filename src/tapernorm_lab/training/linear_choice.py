"""Which kernel computes the linear maps of a training: the one that is named, or the faster one on its own shapes."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.linear_kernel import LinearKernel, set_linear_kernel
from tapernorm.linear_maps import is_like_linear, sizes
from tapernorm.util.atomic_files import read_json, write_json
from tapernorm.util.rng import generator

from ..config.linear_job import LinearMap
from .plan import Plan
from .ranks import from_leader

_FILE = "kernels.json"
_ROUNDS = 6  # of which the first is not timed
_TIE = 1.1  # below, oneDNN is no faster than the default as far as other load and small operations let one tell


def settle_linear_kernel(plan: Plan, model: nn.Module) -> Plan:
    """Choose the kernel of this process for the training of `model`, by hardware.linear; the plan that names it.

    A choice by measurement lies in the plan's folder, for an attempt that resumes.

    Raises:
        UserError: as `set_linear_kernel`.
    """
    asked = plan.hardware.linear
    kernel: LinearKernel = "aten"
    if next(model.parameters()).device.type == "cpu":
        kernel = from_leader(lambda: _kept_choice(plan, model)) if asked == "auto" else asked
    set_linear_kernel(kernel)
    return replace(plan, hardware=plan.hardware.model_copy(update={"linear": kernel}))


def _kept_choice(plan: Plan, model: nn.Module) -> LinearKernel:
    if plan.optimisation.precision != "float32":
        return "aten"
    file = plan.folder / _FILE
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        inputs, _ = plan.batch_at(0)
        write_json(file, choose(maps_of(model, inputs[: plan.hardware.micro_batch].numel())))
    return read_json(file)["linear"]


def maps_of(model: nn.Module, rows: int) -> list[LinearMap]:
    """Return the linear maps of a model in one forward pass of so many tokens."""
    shapes = Counter(sizes(layer) for layer in model.modules() if is_like_linear(layer))
    return [LinearMap.at_most(rows, shape, count) for shape, count in shapes.items()]


def choose(maps: Iterable[LinearMap]) -> dict[str, Any]:
    """Choose the faster kernel for these maps, in this process's threads; a near tie takes PyTorch's default.

    Each map runs forward and backward by both kernels in turn. Its time is the least of the rounds.

    Returns linear, the kernel; and speedup, of oneDNN over the default, None where there is no oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        return {"linear": "aten", "speedup": None}
    seconds: dict[LinearKernel, float] = {"aten": 0.0, "onednn": 0.0}
    for one in maps:
        for kernel, least in _least_seconds(one).items():
            seconds[kernel] += one.times * least
    speedup = seconds["aten"] / seconds["onednn"]
    return {"linear": "onednn" if speedup >= _TIE else "aten", "speedup": speedup}


def _least_seconds(one: LinearMap) -> dict[LinearKernel, float]:
    draw = generator(0, "probe")  # the generator of the training is left alone

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    layer = nn.Linear(one.d_in, one.d_out, bias=False, device="meta")
    layer.weight = nn.Parameter(random(one.d_out, one.d_in))
    x, grad = random(one.rows, one.d_in).requires_grad_(), random(one.rows, one.d_out)
    least: dict[LinearKernel, float] = {"aten": float("inf"), "onednn": float("inf")}
    for number in range(_ROUNDS):
        for kernel in sorted(least, reverse=number % 2 == 1):
            with set_linear_kernel(kernel):
                began = time.perf_counter()
                torch.autograd.grad(layer(x), (x, layer.weight), grad)
                if number > 0:
                    least[kernel] = min(least[kernel], time.perf_counter() - began)
    return least
