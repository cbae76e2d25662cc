"""Verbs that train: pretrain, finetune."""

import argparse
from collections.abc import Callable
from typing import Any

from tapernorm.util.errors import UserError

from ..config import cells
from ..config.gpt2 import METHODS
from ..config.jobs import BaseJob, FinetuneJob, PretrainJob
from ..config.run import Config
from ..config.sections import HardwareConfig
from ..config.study import ArmJob
from ..config.variants import VARIANTS
from ..training.gpu_slots import device_slot
from .arguments import (
    Verbs,
    cell_of,
    config_options,
    folders,
    hardware_of,
    job_of,
    output,
    path,
    positive,
    require_inputs,
    seed,
    training,
)


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(pretrain, "train one model of the run, of a study's arm, or a GPT-2 to start from, or resume it")
    config_options(made)
    made.add_argument("--variant", choices=VARIANTS, help="with --config: which variant of the run's own models")
    made.add_argument("--width", type=positive, metavar="D", help="with --config: its d_model")
    made.add_argument("--stage", metavar="NAME", help="with --config: which stage of the study")
    made.add_argument("--arm", metavar="NAME", help="with --config: which arm of the stage")
    made.add_argument("--size", metavar="NAME", help="with --config: which GPT-2, trained here or published")
    made.add_argument("--seed", type=seed, metavar="S", help="with --config: seed of the model, a GPT-2 apart")
    made.add_argument("--tokens", type=path, metavar="DIR", help="token stream that `tapernorm tokens` wrote")
    made.add_argument(
        "--blocks", type=path, metavar="DIR", help="for a GPT-2 that is trained: blocks that `tapernorm tokens` wrote"
    )
    output(made, "run folder: metrics, weights, result.json")
    training(made)

    made = verbs.add(finetune, "fine-tune a GPT-2 by one method, or resume it, and score it")
    config_options(made)
    made.add_argument("--method", choices=METHODS, help="with --config: which method")
    made.add_argument("--size", metavar="NAME", help="with --config: which size")
    made.add_argument("--seed", type=seed, metavar="S", help="with --config: which seed")
    folders(made, base="folder written by `tapernorm pretrain`", blocks="blocks that `tapernorm tokens` wrote")
    output(made, "run folder: metrics, weights, result.json")
    training(made)


_CHOICES = {  # what a config's models are chosen by -> all options that such a choice takes
    "size": ("size",),
    "stage": ("stage", "arm", "seed"),
    "arm": ("stage", "arm", "seed"),
    "variant": ("variant", "width", "seed"),
}


def pretrain(arguments: argparse.Namespace) -> None:
    chosen = next((name for name in _CHOICES if getattr(arguments, name) is not None), "variant")
    others = [name for name in ("variant", "width", "stage", "arm", "size", "seed") if name not in _CHOICES[chosen]]
    if wrong := [f"--{name}" for name in others if getattr(arguments, name) is not None]:
        raise UserError(f"--{chosen} and {', '.join(wrong)} choose models of different kinds: leave one out")
    cell = cell_of(arguments, *_CHOICES[chosen])

    def cut(config: Config) -> PretrainJob | ArmJob | BaseJob:
        if chosen == "size":
            return config.base_job(*cell)
        return cells.pretrain_job(config, *cell) if chosen == "variant" else cells.arm_job(config, *cell)

    job = job_of(arguments, PretrainJob, cut, ArmJob, BaseJob)
    hardware = hardware_of(arguments)
    given = {"tokens": arguments.tokens, "blocks": arguments.blocks}
    if isinstance(job, BaseJob):
        require_inputs(f"GPT-2 {job.size}", given, ("blocks",) if job.fresh else ())
        _base(job, hardware, arguments)
        return
    require_inputs("a model that is pre-trained", given, ("tokens",))

    def work() -> dict[str, Any]:
        places = (arguments.tokens, arguments.out, hardware)
        if isinstance(job, ArmJob):
            from ..experiments.study_arm import run_arm

            return run_arm(job, *places, overwrite=arguments.overwrite)
        from ..experiments.pretrain import pretrain

        return pretrain(job, *places, overwrite=arguments.overwrite)

    result = _on_devices(arguments, hardware, work, whole=_whole_gpus(hardware))
    if result is not None:
        told = result.get("diverged")
        print(f"diverged at step {told['step']}: {told['what']} is not finite" if told else _score(result))


def _base(job: BaseJob, hardware: HardwareConfig, arguments: argparse.Namespace) -> None:
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
