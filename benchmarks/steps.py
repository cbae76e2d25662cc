"""The optimizer step of the trainer on fixed tokens, which the step benchmarks time."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from tapernorm.linear_kernel import LinearKernel, set_linear_kernel
from tapernorm.taper import Taper
from tapernorm_lab.experiments.speed.interleaved_timing import interleave, paired_speedup
from tapernorm_lab.training.metrics import gradient_norm
from tapernorm_lab.training.norm_driver import NormDriver, driver_of
from tapernorm_lab.training.plan import Optimisation
from tapernorm_lab.training.training_loss import compiled_loss, training_loss

from .report import Figure, figure

ROUNDS, WARMUP = 41, 3
SETTINGS = Optimisation(
    lr=3e-4,
    min_lr=0.0,
    warmup=5,
    decay=100,
    betas=(0.9, 0.95),
    adam_eps=1e-8,
    weight_decay=0.0,
    clip_norm=1.0,
    precision="float32",
    log_every=1,
    eval_every=0,
)


def one_step(
    model: nn.Module,
    changes: Taper | NormDriver | None,
    inputs: Tensor,
    targets: Tensor,
    *,
    kernel: LinearKernel = "aten",
    precision: Literal["float32", "bf16"] = "float32",
    compiled: bool = False,
) -> Callable[[], None]:
    """Return a function that takes one optimizer step of `model` on inputs and targets (B, T)."""
    driver, optimizer = driver_of(changes), SETTINGS.optimizer(model)
    parameters = list(model.parameters())
    loss = compiled_loss(driver, inputs.device, "bench") if compiled else training_loss

    def step() -> None:
        with set_linear_kernel(kernel):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                ce, aux, _ = loss(model, driver, inputs, targets)
            (ce + aux).backward()
        norm = gradient_norm(parameters)
        norm.item()
        nn.utils.clip_grads_with_norm_(parameters, SETTINGS.clip_norm, norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(
    name: str, arms: Mapping[str, Callable[[], None]], bounds: Mapping[str, tuple[str, float]], *, threads: int
) -> Iterator[Figure]:
    """Yield the speed ratio of each arm in `bounds`, and the step time of every arm.

    `bounds` is arm -> (reference arm, smallest passing ratio).
    """
    torch.set_num_threads(threads)
    samples = interleave(arms, rounds=ROUNDS, warmup=WARMUP)
    for arm, (reference, bound) in bounds.items():
        yield figure(f"{name}.{arm}_over_{reference}", paired_speedup(samples, arm, reference), "x", at_least=bound)
    for arm, seconds in samples.items():
        yield figure(f"{name}.{arm}.step_time", seconds, "s")
