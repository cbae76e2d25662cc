"""Where the time of a training step goes: `python -m benchmarks.profile --out results/bench/profile.json`.

torch.profiler watches optimizer steps of the trainer itself, eager, one thread. Each operator counts for the part of
the step that called it. An operator of the backward pass counts for the part that it differentiates. The profiler's own
work inflates all parts, and Python most.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from tapernorm.architectures import architecture_of
from tapernorm.models.decoder import Decoder
from tapernorm.norms import is_norm
from tapernorm.util.atomic_files import write_json
from tapernorm.util.provenance import provenance
from tapernorm.util.rng import generator
from tapernorm_lab.config.load import load_config
from tapernorm_lab.config.sections import HardwareConfig, paper_d_ff
from tapernorm_lab.experiments.finetune import attach_method
from tapernorm_lab.experiments.pretrain import attach_variant
from tapernorm_lab.models.gpt2 import fresh
from tapernorm_lab.training import trainer as training
from tapernorm_lab.training.metrics import StepMeter
from tapernorm_lab.training.plan import Optimisation, Plan
from tapernorm_lab.training.trainer import Trainer
from tapernorm_lab.training.training_loss import next_tokens
from tapernorm_lab.training.validation_loss import Evaluation

CONFIGS = Path(__file__).parents[1] / "config"
STEPS = 10  # a multiple of log_every, so that metrics have their share
PART = "part: "
OPERATORS = {  # that stand for a part by themselves
    "tapernorm_lab::linear_cross_entropy": "head and cross-entropy",
    "Optimizer.step#AdamW.step": "optimizer",
    "Optimizer.zero_grad#AdamW.zero_grad": "optimizer",
}
PARTS = (
    *("linear maps", "head and cross-entropy", "attention", "activation function", "norms", "statistics of norms"),
    *(
        "embedding and residual stream",
        "gradient norm and clipping",
        "optimizer",
        "metrics",
        "batch",
        "autograd engine",
    ),
    "Python",
)


def main() -> None:
    """Profile every model, print its parts and write them all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the parts")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each model that are profiled")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, trainer, first in models(Path(folder)):
            row = {"model": name, **parts_of(trainer, first, arguments.steps)}
            told = ", ".join(f"{part} {share:.1%}" for part, share in row["shares"].items())
            print(f"{name}: {row['step_ms']:.3g} ms a step, n = {row['n']}; {told}", flush=True)
            rows.append(row)
    write_json(arguments.out, {"models": rows, "provenance": provenance()})


def models(folder: Path) -> Iterator[tuple[str, Trainer, int]]:
    """Yield name, trainer and first profiled step of each model, whose norms mix from that step on."""
    config = load_config(CONFIGS / "cpu.yaml")
    study = config.pretrain_job("internal_aux", 64, 1)
    for d_model in (64, 256):
        shape = replace(study.model, d_model=d_model, d_ff=paper_d_ff(d_model))
        job = study.model_copy(update={"model": shape})
        decoder = Decoder(shape).initialize(generator(job.seed, "init"))
        rows = torch.randint(shape.vocab_size, (job.train.batch, shape.context + 1), generator=generator(0, "bench"))
        plan = plan_of(
            Optimisation.of_pretraining(job.train, job.steps),
            job.steps,
            rows[:, :-1],
            rows[:, 1:],
            config.hardware,
            folder,
        )
        taper = attach_variant(decoder, job)
        assert taper is not None
        assert taper.schedule is not None
        yield f"study, d {d_model}", Trainer(decoder, taper, plan), taper.schedule.start
    config = load_config(CONFIGS / "demo.yaml")
    job = config.finetune_job("internal_aux", "mini", 1)
    base = config.base_job("mini").fresh
    assert base is not None
    assert job.taper is not None
    vocabulary = config.gpt2_tokenizer_job().tokenizer.vocab_size
    model = fresh(base.shape, vocab_size=vocabulary, context=job.context, generator=generator(job.seed, "init")).train()
    rows = torch.randint(vocabulary, (job.batch, job.context), generator=generator(0, "bench"))
    hardware = config.hardware.model_copy(update={"micro_batch": job.micro_batch})
    plan = plan_of(Optimisation.of_finetuning(job), job.steps, *next_tokens(rows), hardware, folder)
    yield "demo's GPT-2, d 48", Trainer(model, attach_method(model, job, eot=0), plan), job.taper.start


def plan_of(
    optimisation: Optimisation,
    steps: int,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    hardware: HardwareConfig,
    folder: Path,
) -> Plan:
    """Return a plan of `steps` steps on one batch (B, T), which validates nothing."""
    return Plan(
        label="profile",
        seed=0,
        steps=steps,
        optimisation=optimisation,
        hardware=hardware,
        batch_at=lambda step: (inputs, targets),
        validate=lambda: Evaluation(0.0, 1, None),
        tokens_per_step=inputs.numel(),
        fingerprint="profile",
        folder=folder,
    )


def parts_of(trainer: Trainer, first: int, steps: int) -> dict[str, Any]:
    """Return the median time of a step without the profiler, and each part's share of the steps with it.

    The first is the time of this process, which stands still while another process has the core.
    """
    trainer.model.train()
    for k in range(3):  # warm up; at g = 1, where what the calibration needs is observed
        trainer.step(k)
    seconds = []
    for k in range(first, first + steps):
        began = time.process_time()
        trainer.step(k)
        seconds.append(time.process_time() - began)
    with named_parts(trainer), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for k in range(first, first + steps):
            with record_function(f"{PART}step"):
                trainer.step(k)
    spent = dict.fromkeys(PARTS, 0.0)
    for part, microseconds in attributed(profiler.events() or []):
        spent[part] += microseconds
    total = sum(spent.values())
    shares = {part: value / total for part, value in sorted(spent.items(), key=lambda item: -item[1])}
    return {
        "step_ms": 1000 * median(seconds),
        "profiled_step_ms": total / steps / 1000,
        "n": steps,
        "shares": shares,
    }


def named_parts(trainer: Trainer) -> ExitStack:
    """Return a context in which the profiler sees the part of the step that an operator belongs to."""
    stack = ExitStack()
    model = trainer.model
    arch = architecture_of(model)
    for name, module in model.named_modules():
        part = _part_of_module(arch.blocks, name, module)
        if part is not None:
            ranges: list[record_function] = []

            def enter(*_: Any, part: str = part, ranges: list[record_function] = ranges) -> None:
                ranges.append(record_function(PART + part))
                ranges[-1].__enter__()

            def leave(*_: Any, ranges: list[record_function] = ranges) -> None:
                ranges.pop().__exit__(None, None, None)

            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
    functions: list[tuple[Any, str, str]] = [
        (training, "gradient_norm", "gradient norm and clipping"),
        (nn.utils, "clip_grads_with_norm_", "gradient norm and clipping"),
        (StepMeter, "add", "metrics"),
        (StepMeter, "row", "metrics"),
    ]
    if trainer.driver is not None:
        functions += [(trainer.driver, name, "statistics of norms") for name in ("set_step", "auxiliary_loss", "row")]
    for owner, name, part in functions:
        stack.enter_context(patch.object(owner, name, _within(part, getattr(owner, name))))
    return stack


def _part_of_module(blocks: str, name: str, module: nn.Module) -> str | None:
    if is_norm(module):
        return "norms"
    if name == blocks.rpartition(".")[0]:
        return "embedding and residual stream"
    if name.startswith(f"{blocks}.") and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"):
        return "linear maps"
    if name.endswith("attn"):
        return "attention"
    return "activation function" if name.endswith("mlp") else None


def _within(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        with record_function(PART + part):
            return function(*arguments, **options)

    return run


def attributed(events: Any) -> Iterator[tuple[str, float]]:
    """Yield part and own microseconds of every event, without those of its children."""
    forward = {event.sequence_nr: event for event in events if event.sequence_nr >= 0 and not _is_backward(event)}
    for event in events:
        if _root(event).name != f"{PART}step":
            continue
        name, own = event.name, event.self_cpu_time_total
        if name.startswith(PART):
            yield "Python", own
        elif name.startswith("autograd::engine"):
            yield "autograd engine", own
        else:
            yield _part(event, forward), own


def _part(event: Any, forward: dict[int, Any]) -> str:
    while event is not None:
        if event.name in OPERATORS:
            return OPERATORS[event.name]
        if event.name.startswith("autograd::engine"):
            origin = forward.get(event.sequence_nr)
            return "autograd engine" if origin is None else _part(origin, {})
        if event.name.startswith(PART) and event.name != f"{PART}step":
            return event.name.removeprefix(PART)
        event = event.cpu_parent
    return "batch"  # and what else the trainer does by itself


def _is_backward(event: Any) -> bool:
    while event is not None:
        if event.name.startswith("autograd::engine"):
            return True
        event = event.cpu_parent
    return False


def _root(event: Any) -> Any:
    while event.cpu_parent is not None:
        event = event.cpu_parent
    return event


if __name__ == "__main__":
    main()
