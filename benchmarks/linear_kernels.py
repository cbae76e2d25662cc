"""Training-step speed by the kernel of float32 linear maps that is faster here, and by bfloat16.

The reference is transformers' model in eager float32 by PyTorch's defaults. A second one has the same kernel as ours:
it tells what the kernel gives from what the code gives.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tapernorm.linear_kernel import LinearKernel
from tapernorm.util.compiler import has_compiler
from tapernorm.util.rng import generator
from tapernorm_lab.config.load import load_config
from tapernorm_lab.experiments.speed.interleaved_timing import interleave, paired_speedup
from tapernorm_lab.training.device import choose, maps_of
from tapernorm_lab.training.training_loss import next_tokens

from . import finetune_step, train_step
from .models import decoder, stock_llama
from .report import Figure, figure
from .steps import one_step

ROUNDS, WARMUP = 15, 2
STUDY, STUDY_WIDTH = Path(__file__).parents[1] / "config" / "cpu.yaml", 64
_WORTH = 1.5  # oneDNN's speed over the default's from which the bounds hold

Bounds = Mapping[tuple[str, int], float]  # (arm, threads) -> least speed over the reference


@dataclass(frozen=True)
class Subject:
    """One shape: what is trained, the same model of transformers, and what it must reach.

    Attributes:
        batch: inputs and targets (B, T).
        ours: makes the model.
        theirs: makes the reference.
        arms: beside float32: bf16, compiled.
    """

    name: str
    batch: tuple[Tensor, Tensor]
    ours: Callable[[], nn.Module]
    theirs: Callable[[], nn.Module]
    arms: tuple[str, ...]
    bounds: Bounds


def measure() -> Iterator[Figure]:
    """Speeds of each shape on one and on two threads, and the speed of oneDNN's linear maps alone."""
    for subject in (wide(), study(), gpt2()):
        for threads in (1, 2):
            yield from compare(subject, threads)


def wide() -> Subject:
    """A decoder of width 256."""
    shape = train_step.SHAPE
    bounds = {("float32", 1): 1.5, ("float32", 2): 1.3, ("bf16", 1): 2.2, ("bf16", 2): 1.9}
    batch = train_step.windows()
    return Subject("d256", batch, lambda: decoder(shape), lambda: stock_llama(decoder(shape)), ("bf16",), bounds)


def study() -> Subject:
    """The decoder of the study."""
    job = load_config(str(STUDY)).pretrain_job("baseline", STUDY_WIDTH, 1)
    shape = job.model
    both = torch.randint(shape.vocab_size, (job.train.batch, shape.context + 1), generator=generator(0, "bench"))
    arms = ("compiled",) if has_compiler(torch.device("cpu")) else ()
    bound_arm = arms[0] if arms else "float32"  # the bound is of the faster of the two
    bounds = {(bound_arm, 1): 1.25, (bound_arm, 2): 1.3}
    batch = both[:, :-1], both[:, 1:]
    return Subject("study", batch, lambda: decoder(shape), lambda: stock_llama(decoder(shape)), arms, bounds)


def gpt2() -> Subject:
    """Vanilla fine-tuning of a small GPT-2, whose code is transformers' own: only the kernel differs."""
    batch = next_tokens(finetune_step.tokens())
    return Subject("gpt2", batch, finetune_step.gpt2, finetune_step.gpt2, (), {("float32", 1): 1.3})


def compare(subject: Subject, threads: int) -> Iterator[Figure]:
    """The figures of one shape on so many threads."""
    torch.set_num_threads(threads)
    found = choose(maps_of(subject.ours(), subject.batch[0].numel()))
    kernel: LinearKernel = found["linear"]
    name = f"linear_kernels.{subject.name}.threads{threads}"
    if found["speedup"] is not None:
        yield figure(f"{name}.onednn_over_default", found["speedup"], "x")
    held = (found["speedup"] or 0) >= _WORTH
    why = None if held else f"no bound: oneDNN's linear maps are {found['speedup'] or 0:.2f} times the default's speed"
    batch = subject.batch
    arms = {
        "reference": one_step(subject.theirs(), None, *batch),
        "reference_same_kernel": one_step(subject.theirs(), None, *batch, kernel=kernel),
        "float32": one_step(subject.ours(), None, *batch, kernel=kernel),
    }
    if "bf16" in subject.arms:
        arms["bf16"] = one_step(subject.ours(), None, *batch, precision="bf16")
    if "compiled" in subject.arms:
        arms["compiled"] = one_step(subject.ours(), None, *batch, kernel=kernel, compiled=True)
    samples = interleave(arms, rounds=ROUNDS, warmup=WARMUP)
    for arm in ("float32", *subject.arms):
        bound = subject.bounds.get((arm, threads))
        told = None if bound is None else why
        speed = paired_speedup(samples, arm, "reference")
        yield figure(f"{name}.{arm}_over_reference", speed, "x", at_least=bound if held else None, note=told)
        speed = paired_speedup(samples, arm, "reference_same_kernel")
        yield figure(f"{name}.{arm}_over_reference_same_kernel", speed, "x")
    for arm, seconds in samples.items():
        yield figure(f"{name}.{arm}.step_time", seconds, "s")
