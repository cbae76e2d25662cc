"""Verbs that train: pretrain, arm, base, finetune."""

import argparse
from collections.abc import Callable
from typing import Any

from ..config import cells
from ..config.gpt2 import METHODS
from ..config.jobs import BaseJob, FinetuneJob, PretrainJob
from ..config.sections import VARIANTS, HardwareConfig
from ..config.study import ArmJob
from ..training.gpu_slots import device_slot
from .arguments import (
    Verbs,
    cell_of,
    folders,
    hardware_of,
    job_of,
    output,
    path,
    positive,
    seed,
    training,
)


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(pretrain, "train one model of the run, or resume it, and score it at g = 0", configured=True)
    made.add_argument("--variant", choices=VARIANTS, help="with --config: which variant")
    made.add_argument("--width", type=positive, metavar="D", help="with --config: which d_model")
    made.add_argument("--seed", type=seed, metavar="S", help="with --config: which seed")
    folders(made, tokens="folder written by `tapernorm tokens`")
    output(made, "run folder: metrics, weights, result.json")
    training(made)

    made = verbs.add(arm, "train one model of a study's arm, or resume it, and score it at g = 0", configured=True)
    made.add_argument("--stage", metavar="NAME", help="with --config: which stage of the study")
    made.add_argument("--arm", metavar="NAME", help="with --config: which arm of the stage")
    made.add_argument("--seed", type=seed, metavar="S", help="with --config: which seed")
    folders(made, tokens="folder written by `tapernorm tokens`")
    output(made, "run folder: metrics, weights, result.json")
    training(made)

    made = verbs.add(base, "bring the GPT-2 that fine-tunes start from, or pre-train it", configured=True)
    made.add_argument("--size", metavar="NAME", help="with --config: which size")
    made.add_argument(
        "--blocks", type=path, metavar="DIR", help="folder written by `tapernorm blocks`, for a model made here"
    )
    output(made, "run folder: weights, result.json")
    training(made)

    made = verbs.add(finetune, "fine-tune a GPT-2 by one method, or resume it, and score it", configured=True)
    made.add_argument("--method", choices=METHODS, help="with --config: which method")
    made.add_argument("--size", metavar="NAME", help="with --config: which size")
    made.add_argument("--seed", type=seed, metavar="S", help="with --config: which seed")
    folders(made, base="folder written by `tapernorm base`", blocks="folder written by `tapernorm blocks`")
    output(made, "run folder: metrics, weights, result.json")
    training(made)


def pretrain(arguments: argparse.Namespace) -> None:
    cell = cell_of(arguments, "variant", "width", "seed")
    job = job_of(arguments, PretrainJob, lambda config: cells.pretrain_job(config, *cell))
    hardware = hardware_of(arguments)

    def work() -> dict[str, Any]:
        from ..experiments.pretrain import pretrain

        return pretrain(job, arguments.tokens, arguments.out, hardware, overwrite=arguments.overwrite)

    result = _on_devices(arguments, hardware, work, whole=_whole_gpus(hardware))
    if result is not None:
        print(_score(result))


def arm(arguments: argparse.Namespace) -> None:
    stage, name, chosen = cell_of(arguments, "stage", "arm", "seed")

    job = job_of(arguments, ArmJob, lambda config: cells.arm_job(config, stage, name, chosen))
    hardware = hardware_of(arguments)

    def work() -> dict[str, Any]:
        from ..experiments.study_arm import run_arm

        return run_arm(job, arguments.tokens, arguments.out, hardware, overwrite=arguments.overwrite)

    result = _on_devices(arguments, hardware, work, whole=_whole_gpus(hardware))
    if result is not None:
        told = result.get("diverged")
        print(f"diverged at step {told['step']}: {told['what']} is not finite" if told else _score(result))


def base(arguments: argparse.Namespace) -> None:
    (size,) = cell_of(arguments, "size")
    job = job_of(arguments, BaseJob, lambda config: config.base_job(size))
    hardware = hardware_of(arguments)
    if not job.fresh:  # brought here, not trained
        hardware = hardware.model_copy(update={"device": "cpu", "devices_per_job": 1})

    def work() -> dict[str, Any]:
        from ..experiments.gpt2_base import make_base

        return make_base(job, arguments.blocks, arguments.out, hardware, overwrite=arguments.overwrite)

    result = _on_devices(arguments, hardware, work, whole=hardware.devices_per_job)
    if result is not None:
        values = result["values"]
        score = f", valid_ce {values['valid_ce']['value']:.4f} nats/token" if "valid_ce" in values else ""
        print(f"{values['parameters']['value']:,} parameters{score}")


def finetune(arguments: argparse.Namespace) -> None:
    cell = cell_of(arguments, "method", "size", "seed")
    job = job_of(arguments, FinetuneJob, lambda config: cells.finetune_job(config, *cell))
    hardware = hardware_of(arguments, lambda config: config.finetune_hardware(cell[1]))

    def work() -> dict[str, Any]:
        from ..experiments.finetune import finetune

        return finetune(job, arguments.base, arguments.blocks, arguments.out, hardware, overwrite=arguments.overwrite)

    result = _on_devices(arguments, hardware, work, whole=hardware.devices_per_job)
    if result is not None:
        print(f"valid_ce {result['values']['valid_ce']['value']:.4f} nats/token")


def _whole_gpus(hardware: HardwareConfig) -> int:
    """GPUs that a pre-training has for itself: none where it is one process, which shares its GPU."""
    return hardware.devices_per_job if hardware.devices_per_job > 1 else 0


def _score(result: dict[str, Any]) -> str:
    score = result["values"]
    return f"valid_ce {score['valid_ce']['value']:.4f} nats/token, {score['bits_per_byte']['value']:.4f} bits/byte"


def _on_devices(
    arguments: argparse.Namespace, hardware: HardwareConfig, work: Callable[[], dict[str, Any]], *, whole: int
) -> dict[str, Any] | None:
    """What `work` returns, on the devices that it takes; None in a process that is not the one to tell of it.

    A job of several devices is this very command in as many processes, and this one holds the devices for them.

    Args:
        whole: as `device_slot` takes it.
    """
    with device_slot(hardware.device, hardware.jobs_per_gpu, whole=whole):
        from ..training.device import pick_device
        from ..training.ranks import joined, leads

        device = pick_device(hardware.device)
        if hardware.devices_per_job > 1:
            from ..training.ranks import start_ranks

            if start_ranks(hardware.devices_per_job, arguments.words, program=f"{__package__}.main"):
                return None
        with joined(hardware.devices_per_job, device):
            result = work()
            return result if leads() else None
