"""The device of a job, its CPU threads, and the C library's treatment of freed memory."""

import ctypes
import os
import sys

import torch

from tapernorm.util.errors import UserError, setting

from .gpu_slots import most_threads

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
