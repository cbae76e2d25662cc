"""How fast a run is taken to be: constants, each of which says where it comes from, and what finished runs measured."""

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Self

from tapernorm.util.errors import UserError

from .job_cost import Throughput


@dataclass(frozen=True)
class Speeds:
    """One eager job that has its device for itself; `step_s` is of a forward and backward pass."""

    decoder: Throughput
    gpt2: Throughput

    def given(self, *, step_s: float | None = None, flops_per_s: float | None = None) -> Self:
        """The same with what is given in place of both models' own."""
        new = {"step_s": step_s, "flops_per_s": flops_per_s}
        changes = {name: value for name, value in new.items() if value is not None}
        return replace(self, decoder=replace(self.decoder, **changes), gpt2=replace(self.gpt2, **changes))


# An H100. With the steps that config/paper.yaml assumes, the first two numbers give the paper's own hours of its four
# widths within 12 %: nearly all of a step is overhead, and how fast the arithmetic is hardly shows. GPT-2's arithmetic
# is assumed to reach a fifth of the bf16 peak, its matrices being wide.
EAGER = Speeds(decoder=Throughput(0.15, 5e13), gpt2=Throughput(0.15, 2e14))
# Expected, not measured on any GPU by this project.
COMPILED = 0.5  # of a step's overhead is left by torch.compile
FLOAT32 = 0.25  # of bf16's arithmetic is done by float32 in the same time

# One thread of a server's CPU, AMD EPYC, two busy at once. Steps of the demo's decoders of two layers took 6.0, 7.2,
# 8.0 and 10.2 ms at widths 16 to 48; those of its GPT-2s, of two and three layers, 11.8 and 17.0 ms a pass of 8 rows.
# What a job takes besides its steps, in seconds, is from the same runs.
CPU = Speeds(decoder=Throughput(4.9e-3, 6e10), gpt2=Throughput(2e-3, 2.5e10))
CPU_OVERHEAD_S = {
    "corpus": 0.5,
    "tokenizer": 0.5,
    "tokens": 2.0,
    "pretrain": 3.0,
    "arm": 3.0,
    "fold": 1.8,
    "bench": 2.5,
    "base": 5.0,
    "finetune": 5.0,
    "finetune_fold": 4.5,
    "evaluate": 5.0,
    "rows": 1.0,
    "table": 1.2,
    "figure": 2.3,
}
CPU_DECODE_STEP_S = 3e-4  # of a model of two layers, eager
ENGINE_S = 3.0  # Snakemake's own start and end


def measured_speeds(results: Path) -> dict[int, float]:
    """d_model -> median tokens/s of the finished runs in a results.csv of `tapernorm rows`.

    Raises:
        UserError: there is no such file, or it is damaged or of another kind.
    """
    if not results.is_file():
        raise UserError(f"no file {results}: make it with `tapernorm rows training`")
    found: dict[int, list[float]] = {}
    try:
        with open(results, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                found.setdefault(int(row["d_model"]), []).append(float(row["tokens_per_s"]))
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise UserError(f"{results} is no results.csv ({error!r}): make it with `tapernorm rows training`") from None
    if not found:
        raise UserError(f"{results} is no results.csv (it has no row): make it with `tapernorm rows training`")
    return {d_model: median(speeds) for d_model, speeds in found.items()}
