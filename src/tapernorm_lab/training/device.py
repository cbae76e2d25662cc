"""The device of a job, its CPU threads and kernels, and the C library's treatment of freed memory."""

import ctypes
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.linear_kernel import LinearKernel, set_linear_kernel
from tapernorm.linear_maps import is_like_linear, sizes
from tapernorm.util.errors import UserError, setting
from tapernorm.util.rng import generator

from ..config.run_cost import LinearMap
from .gpu_slots import most_threads

_ROUNDS = 6  # of a kernel's timing, of which the first is not timed
_TIE = 1.1  # below, oneDNN is no faster than the default as far as other load and small operations let one tell

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**31 - 1  # free bytes kept at the heap's end: the largest int of mallopt
_MAPPED_BYTES = 1 << 25  # size from which an allocation is mapped and returned by itself: glibc's maximum


def take_device(name: str, threads: int) -> torch.device:
    """Pick the device of this name, and set the CPU threads and memory settings of this process for it.

    Raises:
        UserError: as `pick_device`, or as `take_threads`.
    """
    device = pick_device(name)
    take_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()
    return device


def take_threads(threads: int, key: str = "hardware.threads") -> None:
    """Set the CPU threads of this process.

    Args:
        threads: number of threads.
        key: the setting that gives `threads`, for the message.

    Raises:
        UserError: there are more threads than this machine can run.
    """
    if threads > (most := most_threads()):
        raise UserError(f"{setting(key)} {threads} exceeds what {os.cpu_count()} CPUs can run: give at most {most}")
    torch.set_num_threads(threads)


def pick_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is CUDA if there is a CUDA device, else the CPU.

    Raises:
        UserError: the name is cuda, and there is no CUDA device.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        said = "device cuda: this PyTorch sees no CUDA device"
        raise UserError(f"{said}; set {setting('hardware.device')} to auto or cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def device_name(device: torch.device) -> str:
    """Return the name of a device in results: the model of a GPU, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def keep_freed_memory() -> None:
    """Make glibc keep up to 2 GiB of freed CPU memory for the tensors of the next step.

    By default glibc returns the end of its heap to the kernel once a few dozen MB of it are free, as after each step.
    The kernel must then clear the same pages again for the next step. No number changes. C libraries other than glibc
    are not changed.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


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
