"""Freed memory stays with a process that computes: counted in page faults, which are no matter of speed."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tapernorm.util.errors import UserError
from tapernorm_lab.training.device import pick_device

STEPS = """
import resource, sys
import torch
from tapernorm_lab.training.device import take_device

if sys.argv[1] == "kept":
    take_device("cpu", 1)

model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)], torch.nn.Linear(64, 2048))
tokens, targets = torch.randn(2048, 64), torch.randint(2048, (2048,))

def step():
    torch.nn.functional.cross_entropy(model(tokens), targets).backward()  # logits of 16 MB
    model.zero_grad()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(10):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def page_faults(how: str) -> int:
    """Of ten training steps that allocate what the ten before them had freed, in a process of their own.

    The process begins with a C library that maps such tensors one by one, so that what it does by default, which varies
    with where the heap's end lies, does not matter.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", STEPS, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_a_step_takes_the_memory_that_the_one_before_freed():
    assert page_faults("kept") < 20_000  # 32,000 and more without the trim threshold, of 4 kB each
    if HUGE.is_file() and "[always]" not in HUGE.read_text():  # else a fault brings 2 MB
        assert page_faults("default") > 100_000  # the negative control


def test_devices_are_picked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda answer=available: answer)
        assert [pick_device(name).type for name in ("auto", "cpu")] == [expected, "cpu"]
    with pytest.raises(UserError, match="no CUDA device"):
        pick_device("cuda")
