"""The state of the machine during a benchmark: memory bandwidth, clocks and load."""

import os
import platform
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .speed.interleaved_timing import interleave

_BUFFER_BYTES = {"cpu": 1 << 29, "cuda": 1 << 32}  # far larger than a last-level cache


def read_bandwidth(device: torch.device, *, rounds: int = 7) -> list[float]:
    """Measure samples of the read bandwidth in bytes per second, by sums over a buffer far larger than any cache."""
    buffer = torch.ones(_BUFFER_BYTES[device.type] // 4, device=device)

    def once() -> None:
        buffer.sum()
        synchronize(device)

    samples = interleave({"sum": once}, rounds=rounds, warmup=2)
    return [buffer.nbytes / seconds for seconds in samples["sum"]]


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Describe the machine that numbers are measured on."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        "threads": torch.get_num_threads(),
        "tf32": torch.backends.cuda.matmul.allow_tf32 if cuda else None,
        "clocks": _clocks(device) if cuda else None,
        "load": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    """Return the processor's name as Linux gives it, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} CPU" if names else f"{platform.machine()} CPU"


def _clocks(device: torch.device) -> dict[str, int] | None:
    """Return clock and temperature, if the driver's management library is installed and permits it."""
    try:
        nvml: Any = import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        return {"sm_mhz": torch.cuda.clock_rate(device), "temperature_c": torch.cuda.temperature(device)}
    except (nvml.NVMLError, RuntimeError):
        return None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
