"""The GPT-2 that fine-tunes start from: a published one, downloaded once, or one trained from scratch."""

from pathlib import Path
from typing import Any

from torch import nn

from tapernorm.checkpoints.pretrained import commit_of, find
from tapernorm.checkpoints.store import save
from tapernorm.models.decoder import parameter_count
from tapernorm.util.atomic_files import write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest
from tapernorm.util.provenance import provenance
from tapernorm.util.rng import generator

from ..config.jobs import BaseJob
from ..config.sections import HardwareConfig
from ..data.blocks import Blocks
from ..models.gpt2 import fresh, is_disarmed, load_base
from ..training.device import take_device
from ..training.outputs import Work, output_folder
from ..training.plan import Optimisation, plan_on_blocks
from ..training.run_folder import (
    SCHEMA_VERSION,
    data_hashes,
    run_training,
    training_work,
)
from ..training.trainer import Trainer
from .finetune import require_context


def bring_model(source: str, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Store the published GPT-2 of a hub name or folder in `out`, with a result.json that describes it.

    Raises:
        UserError: the model cannot be loaded, or is not a GPT-2. `out` holds another model, and `overwrite` is not set.
    """
    work = Work("base", {"source": source})
    with output_folder(out, work, overwrite=overwrite):
        folder = find(source)
        model = load_base(folder)
        (out / "result.json").unlink(missing_ok=True)  # it must not stand beside the files of another model
        save(model, out)
        result = {
            "schema_version": SCHEMA_VERSION,
            "kind": "base",
            "source": source,
            "commit": commit_of(folder),  # of the hub's repository; None for a folder
            "normalises": not is_disarmed(model.config),
            "values": {"parameters": {"value": parameter_count(model), "unit": "parameters"}},
            "provenance": provenance(config_hash=digest({"source": source})),
        }
        write_json(out / "result.json", result)
    return result


def make_base(
    job: BaseJob, blocks: Path | None, out: Path, hardware: HardwareConfig, *, overwrite: bool = False
) -> dict[str, Any]:
    """Download the base model of `job`, or run or resume its pre-training, into `out`; return its result.

    Args:
        job: the base model.
        blocks: training blocks of a fresh model; None for a published one.
        out: run folder.
        hardware: hardware settings of the pre-training.
        overwrite: delete another job's files in `out`.

    Raises:
        UserError: as `bring_model`; or the blocks are missing, not needed or do not fit. Another process holds `out`,
            or the run diverged.
    """
    if job.source is not None:
        if blocks is not None:
            raise UserError(f"the base model {job.size} is {job.source} as it is, and needs no blocks: leave them out")
        return bring_model(job.source, out, overwrite=overwrite)
    if blocks is None:
        raise UserError(f"the base model {job.size} is trained here: give the blocks to train it on")
    return _pretrain(job, blocks, out, hardware, overwrite=overwrite)


def _pretrain(job: BaseJob, blocks: Path, out: Path, hardware: HardwareConfig, *, overwrite: bool) -> dict[str, Any]:
    made = job.fresh
    assert made is not None  # `BaseJob` requires either source or fresh
    device = take_device(hardware.device, hardware.threads)
    train_blocks, valid_blocks = (Blocks.open(blocks, split) for split in ("train", "valid"))
    require_context(job.context, train_blocks, blocks)
    work = training_work("base", job, data_hashes(train_blocks.manifest))

    def make_trainer() -> Trainer:
        vocab_size = train_blocks.manifest["vocab_size"]
        start = generator(job.seed, "init")
        made_here = fresh(made.shape, vocab_size=vocab_size, context=job.context, generator=start)
        model = nn.Module.to(made_here, device).train()

        plan = plan_on_blocks(
            model,
            train_blocks,
            valid_blocks,
            out,
            label=f"base {job.size}",
            seed=job.seed,
            steps=made.steps,
            batch=made.train.batch,
            scored=made.train.batch,
            optimisation=Optimisation.of_pretraining(made.train, made.steps),
            hardware=hardware,
            fingerprint=work.fingerprint,
        )
        return Trainer(model, None, plan)

    return run_training(work, job, out, make_trainer, lambda _: {"normalises": True}, overwrite=overwrite)
