"""The verbs that train: pretrain, finetune."""

import argparse
from collections.abc import Callable
from typing import Any

from ..config import cells
from ..config.gpt2 import METHODS
from ..config.jobs import BaseJob, FinetuneJob, PretrainJob
from ..config.run import Config
from ..config.sections import HardwareConfig
from ..config.study import ArmJob
from ..config.variants import VARIANTS
from ..training.gpu_slots import device_slot
from .arguments import OVERWRITE, TRAINING, Verbs, cell_of, config_options, hardware_of, job_of, require_options

_OUT = {"--out DIR!": "run folder to write metrics, weights and result.json into", **OVERWRITE, **TRAINING}
_CHOICES = {  # option that chooses a kind of model -> all options that choose one model of this kind
    "size": ("size",),
    "stage": ("stage", "arm", "seed"),
    "arm": ("stage", "arm", "seed"),
    "variant": ("variant", "width", "seed"),
}


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    table = {
        f"--variant {'|'.join(VARIANTS)}": "with --config: variant of the model, with --width and --seed",
        "--width D": "with --config: d_model of the model",
        "--stage NAME": "with --config: stage of the study, with --arm and --seed",
        "--arm NAME": "with --config: arm of the stage",
        "--size NAME": "with --config: size of the GPT-2 base model to train or to copy",
        "--seed S": "with --config: seed of the model; a GPT-2 base model takes none",
        "--tokens DIR": "token stream that `tapernorm tokens` wrote, for --variant and --stage",
        "--blocks DIR": "blocks that `tapernorm tokens` wrote, to train a GPT-2 base model on",
    }
    summary = "train or resume one model: of a variant, of a study's arm, or a GPT-2 base model"
    config_options(verbs.add(pretrain, summary, table | _OUT))
    table = {
        f"--method {'|'.join(METHODS)}": "with --config: method of the fine-tuning",
        "--size NAME": "with --config: size of the GPT-2",
        "--seed S": "with --config: seed of the fine-tuning",
        "--base DIR!": "run folder of `tapernorm pretrain --size`, with the base model",
        "--blocks DIR!": "blocks that `tapernorm tokens` wrote, to train on",
    }
    config_options(
        verbs.add(
            finetune, "fine-tune a GPT-2 by one method, or resume it, and report its validation loss", table | _OUT
        )
    )


def pretrain(arguments: argparse.Namespace) -> None:
    chosen = next((name for name in _CHOICES if getattr(arguments, name) is not None), "variant")
    every = ("variant", "width", "stage", "arm", "size", "seed")
    require_options(arguments, f"a model chosen by --{chosen}", may=_CHOICES[chosen], of=every)
    cell = cell_of(arguments, *_CHOICES[chosen])

    def cut(config: Config) -> PretrainJob | ArmJob | BaseJob:
        if chosen == "size":
            return config.base_job(*cell)
        return cells.pretrain_job(config, *cell) if chosen == "variant" else cells.arm_job(config, *cell)

    job = job_of(arguments, PretrainJob, cut, ArmJob, BaseJob)
    hardware = hardware_of(arguments)
    if isinstance(job, BaseJob):
        needs = ("blocks",) if job.fresh else ()
        require_options(arguments, f"GPT-2 {job.size}", needs=needs, of=("tokens", "blocks"))
        _base(job, hardware, arguments)
        return
    require_options(arguments, "pre-training with --variant or --stage", needs=("tokens",), of=("tokens", "blocks"))

    def work() -> dict[str, Any]:
        places = (arguments.tokens, arguments.out, hardware)
        if isinstance(job, ArmJob):
            from ..experiments.study_arm import run_arm

            return run_arm(job, *places, overwrite=arguments.overwrite)
        from ..experiments.pretrain import pretrain

        return pretrain(job, *places, overwrite=arguments.overwrite)

    result = _on_devices(arguments, hardware, work, whole=hardware.devices_per_job > 1)
    if result is not None and "diverged" in result:
        print(f"diverged at step {result['diverged']['step']}: {result['diverged']['what']} is not finite")
    elif result is not None:
        print(_score(result))


def _base(job: BaseJob, hardware: HardwareConfig, arguments: argparse.Namespace) -> None:
    if not job.fresh:  # copied, not trained
        hardware = hardware.model_copy(update={"device": "cpu", "devices_per_job": 1})

    def work() -> dict[str, Any]:
        from ..experiments.gpt2_base import make_base

        return make_base(job, arguments.blocks, arguments.out, hardware, overwrite=arguments.overwrite)

    result = _on_devices(arguments, hardware, work, whole=True)
    if result is not None:
        score = f", {_score(result)}" if "valid_ce" in result["values"] else ""
        print(f"{result['values']['parameters']['value']:,} parameters{score}")


def finetune(arguments: argparse.Namespace) -> None:
    cell = cell_of(arguments, "method", "size", "seed")
    job = job_of(arguments, FinetuneJob, lambda config: cells.finetune_job(config, *cell))
    hardware = hardware_of(arguments, lambda config: config.finetune_hardware(cell[1]))

    def work() -> dict[str, Any]:
        from ..experiments.finetune import finetune

        return finetune(job, arguments.base, arguments.blocks, arguments.out, hardware, overwrite=arguments.overwrite)

    result = _on_devices(arguments, hardware, work, whole=True)
    if result is not None:
        print(_score(result))


def _score(result: dict[str, Any]) -> str:
    """Format the validation loss: per token and, where the size of the text is known, per byte."""
    values = result["values"]
    bits = f", {values['bits_per_byte']['value']:.4f} bits/byte" if "bits_per_byte" in values else ""
    return f"valid_ce {values['valid_ce']['value']:.4f} nats/token{bits}"


def _on_devices(
    arguments: argparse.Namespace, hardware: HardwareConfig, work: Callable[[], dict[str, Any]], *, whole: bool
) -> dict[str, Any] | None:
    """Run `work` on the devices of the job and return its result; return None in all processes but the leading one.

    A job of several devices runs this command once per device. The process that starts them holds the devices.

    Args:
        whole: the job takes its GPUs whole, so that no other job shares them.
    """
    with device_slot(hardware.device, hardware.jobs_per_gpu, whole=hardware.devices_per_job * whole):
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
