"""Peak memory of an evaluation, which streams its rows: more rows must not need more memory."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .report import Figure, figure

ROWS, CONTEXT, VOCABULARY, TIMES = 2_000, 64, 1024, 8


def measure() -> Iterator[Figure]:
    """Yield the peak memory of scoring few rows, and its ratio for many rows. Each runs in its own process."""
    few, many = (_peak_bytes(rows) for rows in (ROWS, TIMES * ROWS))
    yield figure("evaluation.peak_memory", many / 1e9, "GB")
    yield figure(f"evaluation.peak_memory_of_{TIMES}_times_the_rows", many / few, "x", at_most=1.02)


def _peak_bytes(rows: int) -> int:
    command = [sys.executable, "-m", __name__, str(rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


def _score(rows: int) -> None:
    import torch

    from tapernorm.util.rng import generator
    from tapernorm_lab.config.gpt2 import Gpt2Shape
    from tapernorm_lab.experiments.row_losses import score_rows
    from tapernorm_lab.models.gpt2 import fresh

    torch.set_num_threads(1)
    shape = Gpt2Shape(d_model=32, n_layer=2, n_head=2, dropout=0.0, norm_eps=1e-5)
    model = fresh(shape, vocab_size=VOCABULARY, context=CONTEXT, generator=generator(0, "init"))
    ids = torch.randint(VOCABULARY, (rows, CONTEXT), generator=generator(0, "rows"), dtype=torch.int32)
    score_rows(model, ids, batch=16, device=torch.device("cpu")).statistics()
    # VmHWM instead of ru_maxrss: a process inherits the latter from its parent.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    print(1024 * int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]))


if __name__ == "__main__":
    _score(int(sys.argv[1]))
