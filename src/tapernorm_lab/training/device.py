"""What a job computes on: its device, its CPU threads, and memory that it keeps for its next step."""

import ctypes
import os
import sys

import torch

from tapernorm.util.errors import UserError, setting

from .gpu_slots import most_threads

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**31 - 1  # at the heap's end: the most that mallopt's int takes
_MAPPED_BYTES = 1 << 25  # allocations from here on are mapped, and given back, each by itself: glibc's own maximum


def take_device(name: str, threads: int) -> torch.device:
    """The device of that name, and this whole process set up for it, for good: CPU threads, freed memory kept.

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
        key: the setting that says how many.

    Raises:
        UserError: they are more than this machine can run.
    """
    if threads > (most := most_threads()):
        raise UserError(f"{setting(key)} {threads} exceeds what {os.cpu_count()} CPUs can run: give at most {most}")
    torch.set_num_threads(threads)


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one.

    Raises:
        UserError: CUDA is asked for and absent.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        said = "device cuda: this PyTorch sees no CUDA device"
        raise UserError(f"{said}; set {setting('hardware.device')} to auto or cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def device_name(device: torch.device) -> str:
    """What results call a device: the model of a GPU, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def keep_freed_memory() -> None:
    """Have the C library keep memory that tensors on the CPU free, up to 2 GiB, for those of the next step.

    By default glibc hands the end of its heap back to the kernel whenever a few dozen MB of it are free, which after
    each step they are; the kernel then clears the same pages anew for the next. No number changes. Other C libraries
    than glibc are left as they are.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
