"""The training of a taper: the model as its owner gave it, its norms on the gate, in the one trainer."""

import shutil
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tapernorm.checkpoints.pretrained import load_pretrained
from tapernorm.checkpoints.store import save
from tapernorm.schedule import GateSchedule
from tapernorm.taper import Taper, attach
from tapernorm.util.atomic_files import discard, write_json
from tapernorm.util.provenance import code_commit

from ..data.blocks import Blocks
from ..data.tokenizers import open_tokenizer
from ..training.norm_driver import norms_told
from ..training.plan import plan_of_tuning
from ..training.run_folder import train_in
from ..training.trainer import Trainer
from .export_run import STORY
from .job import TaperJob
from .options import HELD_OUT
from .resolve import TaperRun
from .scale_warnings import LEVEL, sample_scales
from .scores import SCORES

LAST_GOOD = "last-good"  # the model before a divergence, where its norms were gone already
_DERIVED = (SCORES, "spread.json", LAST_GOOD)  # of one run's weights


def train(
    run: TaperRun,
    facts: Mapping[str, Any],
    blocks: Mapping[tuple[str, str], Blocks],
    device: torch.device,
    fingerprint: str,
) -> None:
    """Train, go on with it, or find it done; the result is published into the run folder, which is held.

    Args:
        facts: what result.json says of the base model.
        fingerprint: digest of all that defines the numbers.

    Raises:
        UserError: as `train_in`; or the model cannot be tapered.
    """
    job = run.job

    def make_trainer() -> Trainer:
        model = load_pretrained(run.base).to(device).train()
        sample = sample_scales(model, blocks[HELD_OUT, "train"].rows, open_tokenizer(run.out / "tokenizer"))
        for line in sample.warnings(run.tapered, level_weight=job.level_weight):
            print(line, file=sys.stderr)
        taper, commit = _attach(model, job), code_commit()  # of what runs here
        plan = plan_of_tuning(
            model,
            blocks[HELD_OUT, "train"],
            blocks[HELD_OUT, "valid"],
            run.out,
            job,
            run.hardware,
            label=f"taper seed{job.seed}",
            fingerprint=fingerprint,
            remedy=remedy_of(job),
            salvage=lambda steps: _salvage(run, facts, model, taper, steps, commit),
            tolerant=True,  # a few lost rows are among what the scores tell
        )
        return Trainer(model, taper, plan)

    train_in(
        run.out,
        "finetune",
        job,
        fingerprint,
        make_trainer,
        lambda trainer: {"base": facts} | norms_told(trainer.driver),
        derived=_DERIVED,
    )


def remedy_of(job: TaperJob) -> str:
    """What may keep a job like this one from diverging."""
    if job.taper is None:
        return "take a lower --lr"
    level = "a higher --level" if job.level_weight else f"--level {LEVEL:g}"
    return f"take a lower --lr, {level}, or --sites without the norms that --dry-run marks"


def _attach(model: nn.Module, job: TaperJob) -> Taper | None:
    """The taper that a job asks for; None for a control, whose norms stay."""
    if job.taper is None:
        return None
    return attach(
        model,
        final=job.final,
        sites=job.sites,
        schedule=GateSchedule(job.taper.start, job.taper.end),
        ema_rate=job.train.ema_rate,
        anchor_weight=job.aux_weight,
        level_weight=job.level_weight,
    )


def _salvage(
    run: TaperRun, facts: Mapping[str, Any], model: nn.Module, taper: Taper | None, steps: int, commit: str | None
) -> str:
    """Keep the model before a divergence, and say so: one whose norms are gone already is one to fold."""
    if taper is None or taper.gate.item() > 0:
        return ""
    kept = run.out / LAST_GOOD
    discard(kept)
    save(model, kept)
    shutil.copytree(run.out / "tokenizer", kept / "tokenizer")
    settings = {"job": run.job.model_dump(mode="json"), "steps": steps}
    write_json(kept / STORY, {"base": facts, **settings, "provenance": {"commit": commit}})
    return f"Its norms were gone by then: `tapernorm export --model {kept} …` exports the last good model"
