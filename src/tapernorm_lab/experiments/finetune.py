"""One GPT-2 fine-tune by one of four methods: vanilla, FakeLN, internal and all tapered (method.md section 10)."""

from pathlib import Path
from typing import Any

from tapernorm.architectures import context_of
from tapernorm.checkpoints.store import MODEL_FILES, load
from tapernorm.schedule import GateSchedule
from tapernorm.taper import Taper, attach
from tapernorm.util.atomic_files import sha256_of
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest

from ..config.gpt2 import TAPERED
from ..config.jobs import FinetuneJob
from ..config.sections import HardwareConfig
from ..data.blocks import Blocks
from ..models.fakeln import FakeLN, attach_fakeln
from ..models.gpt2 import GPT2LMHeadModel
from ..training.device import take_device
from ..training.norm_driver import norms_told
from ..training.plan import plan_of_tuning
from ..training.run_folder import data_hashes, require_vocabulary, run_training, training_work
from ..training.trainer import Trainer


def finetune(
    job: FinetuneJob, base: Path, blocks: Path, out: Path, hardware: HardwareConfig, *, overwrite: bool = False
) -> dict[str, Any]:
    """Run or resume `job` from the model in `base` on the blocks in `blocks`, write its results to `out`, return them.

    Raises:
        UserError: base, blocks and job do not fit, another process holds `out`, or the run diverged. `out` belongs to
            another job, and `overwrite` is not set.
    """
    device = take_device(hardware.device, hardware.threads)
    job.require_whole_micro_batches(hardware.devices_per_job)
    if job.micro_batch is not None:  # it defines FakeLN's numbers, so it overrides the hardware setting
        hardware = hardware.model_copy(update={"micro_batch": job.micro_batch})
    train_blocks, valid_blocks = (Blocks.open(blocks, split) for split in ("train", "valid"))
    require_context(job.context, train_blocks, blocks)
    data = {**data_hashes(train_blocks.manifest), "base": {name: sha256_of(base / name) for name in MODEL_FILES}}
    work = training_work("finetune", job, data)

    def make_trainer() -> Trainer:
        model = load(base).to(device).train()
        if not isinstance(model, GPT2LMHeadModel):
            raise UserError(f"{base} holds a {type(model).__name__} and a GPT-2 is fine-tuned here")
        require_vocabulary(model.config.vocab_size, train_blocks.manifest, blocks)
        if (longest := context_of(model)) < job.context:
            raise UserError(f"{base} takes {longest} tokens and the blocks have {job.context}: cut shorter ones")

        label = f"{job.method} {job.size} seed{job.seed}"
        where = (train_blocks, valid_blocks, out)
        plan = plan_of_tuning(model, *where, job, hardware, label=label, fingerprint=work.fingerprint)
        return Trainer(model, attach_method(model, job, eot=train_blocks.manifest["eod"]), plan)

    def details(trainer: Trainer) -> dict[str, Any]:
        return {**_details(trainer), "data_hash": digest(data)}

    return run_training(work, job, out, make_trainer, details, overwrite=overwrite)


def attach_method(model: GPT2LMHeadModel, job: FinetuneJob, *, eot: int) -> Taper | FakeLN | None:
    """Attach what the job's method needs; vanilla needs nothing.

    Raises:
        UserError: FakeLN's last removal lies after the last step.
    """
    if job.fakeln is not None:
        driver = attach_fakeln(
            model,
            schedule=job.fakeln,
            ema_rate=job.fakeln.ema_rate,
            aux_weight=job.aux_weight,
            eot=eot,
        )
        if (last := max(driver.removals.values())) > job.steps:
            raise UserError(f"FakeLN removes its last norm at step {last} and the run has {job.steps}: run longer")
        return driver
    if job.taper is not None:
        return attach(
            model,
            final=TAPERED[job.method].final,
            schedule=GateSchedule(job.taper.start, job.taper.end),
            ema_rate=job.train.ema_rate,
            anchor_weight=job.aux_weight,
        )
    return None


def _details(trainer: Trainer) -> dict[str, Any]:
    """Return the entries of result.json about the norms."""
    fakeln = trainer.driver if isinstance(trainer.driver, FakeLN) else None
    told = norms_told(trainer.driver, "c" if fakeln is None else "sigma_bar")
    return {**told, "removals": None if fakeln is None else fakeln.removals}


def require_context(context: int, blocks: Blocks, folder: Path) -> None:
    """Raise UserError unless the blocks in `folder` are rows of `context` tokens."""
    if blocks.manifest["context"] != context:
        raise UserError(
            f"{folder} holds blocks of {blocks.manifest['context']} tokens and the job asks for {context}: "
            "cut the blocks again"
        )
