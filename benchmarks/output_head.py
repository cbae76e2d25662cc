"""Output head with cross-entropy, forward and backward: in chunks of tokens against the whole logit matrix.

python -m benchmarks.output_head

One thread, timed by the clock of the process, which stands still while another process has the core.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapernorm.util.rng import generator
from tapernorm_lab.experiments.speed.interleaved_timing import interleave, paired_speedup
from tapernorm_lab.models.output_head import head_cross_entropy
from tapernorm_lab.training.device import keep_freed_memory

from .report import Figure, figure, line

ROUNDS, WARMUP = 15, 2
SHAPES = (  # tokens of a forward pass, D, V
    *((2048, 64, vocabulary) for vocabulary in (1024, 2048, 4096)),  # config/cpu.yaml has 2048
    *((2048, d_model, 2048) for d_model in (96, 256)),
    (512, 48, 1024),  # the demo's GPT-2
    (1024, 384, 4096),  # benchmarks/finetune_step.py
    *((2048, d_model, 10000) for d_model in (64, 512)),  # four windows of the paper's
)


def measure() -> Iterator[Figure]:
    """Yield speed in chunks relative to the whole matrix, and time and peak memory of both."""
    torch.set_num_threads(1)
    keep_freed_memory()
    for shape in SHAPES:
        arms = {name: _step(loss, *shape) for name, loss in LOSSES.items()}
        samples = interleave(arms, rounds=ROUNDS, warmup=WARMUP, clock=time.process_time)
        name = "output_head.tokens{}.d{}.v{}".format(*shape)
        yield figure(f"{name}.chunks_over_whole", paired_speedup(samples, "chunks", "whole"), "x")
        for arm, seconds in samples.items():
            yield figure(f"{name}.{arm}.time", seconds, "s")
            yield figure(f"{name}.{arm}.peak_memory", _peak_bytes(arm, *shape) / 1e9, "GB")


def whole(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the loss by PyTorch's own linear map and cross-entropy."""
    return F.cross_entropy(head(hidden), targets)


LOSSES = {"whole": whole, "chunks": head_cross_entropy}


def _step(loss: Callable[..., Tensor], tokens: int, d_model: int, vocabulary: int) -> Callable[[], None]:
    draw = generator(0, "bench")
    head = nn.Linear(d_model, vocabulary, bias=False)
    hidden = torch.randn(tokens, d_model, generator=draw, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), generator=draw)

    def step() -> None:
        hidden.grad = head.weight.grad = None
        loss(head, hidden, targets).backward()

    return step


def _peak_bytes(arm: str, *shape: int) -> int:
    command = [sys.executable, "-m", "benchmarks.output_head", arm, *map(str, shape)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _memory(line: str) -> int:
    status = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return 1024 * int(status[line].split()[0])


def main(words: list[str]) -> None:
    """Print every figure; ARM TOKENS D V prints the bytes that one step of the arm adds to this process."""
    if not words:
        for measured in measure():
            print(line(measured), flush=True)
        return
    torch.set_num_threads(1)
    small, step = (_step(LOSSES[words[0]], *shape) for shape in ((2, 2, 2), tuple(map(int, words[1:]))))
    small()  # what the first call of all loads
    before = _memory("VmRSS")
    step()
    print(_memory("VmHWM") - before)


if __name__ == "__main__":
    main(sys.argv[1:])
