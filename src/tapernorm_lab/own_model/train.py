"""The training of a taper: load the base model, attach the gate, and run the trainer."""

import shutil
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tapernorm.architectures import select_norms
from tapernorm.checkpoints.pretrained import load_pretrained
from tapernorm.checkpoints.store import save
from tapernorm.schedule import GateSchedule
from tapernorm.taper import Taper, attach, attach_norms
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

LAST_GOOD = "last-good"  # the model before a divergence at g = 0
_DERIVED = (SCORES, "spread.json", LAST_GOOD)  # computed from the weights, so deleted with them


def train(
    run: TaperRun,
    facts: Mapping[str, Any],
    blocks: Mapping[tuple[str, str], Blocks],
    device: torch.device,
    fingerprint: str,
) -> None:
    """Train, resume, or return at once if the training is done. The result goes into the run folder.

    Args:
        facts: entries of result.json about the base model.
        fingerprint: digest of everything that defines the numbers.

    Raises:
        UserError: as `train_in`; or the model cannot be tapered.
    """
    job = run.job

    def make_trainer() -> Trainer:
        model = load_pretrained(run.base).to(device).train()
        sample = sample_scales(model, blocks[HELD_OUT, "train"].rows, open_tokenizer(run.out / "tokenizer"))
        for line in sample.warnings(run.tapered, level_weight=job.level_weight):
            print(line, file=sys.stderr)
        taper, commit = _attach(model, job), code_commit()
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
            tolerant=True,  # the scores report rows whose loss is not finite
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
    """Return the options that may keep such a job from diverging."""
    if job.taper is None:
        return "give a lower --lr"
    level = "a higher --level" if job.level_weight else f"--level {LEVEL:g}"
    return f"give a lower --lr, {level}, or --sites without the norms that --dry-run marks"


def _attach(model: nn.Module, job: TaperJob) -> Taper | None:
    """Attach the taper of a job and return it; None for a control without a level loss."""
    if job.levels_fixed_at is not None:
        return attach_control(model, job, fixed_at=job.levels_fixed_at)
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
    """Save the model before a divergence, if its gate is 0, and return a line that names the folder."""
    if taper is None or taper.gate.item() > 0:
        return ""
    kept = run.out / LAST_GOOD
    discard(kept)
    save(model, kept)
    shutil.copytree(run.out / "tokenizer", kept / "tokenizer")
    settings = {"job": run.job.model_dump(mode="json"), "steps": steps}
    write_json(kept / STORY, {"base": facts, **settings, "provenance": {"commit": commit}})
    return f"The gate was 0 by then: `tapernorm export --model {kept} …` exports the last good model"


class LevelledControl(Taper):
    """A control: a taper that computes its level loss and never moves its gate, which alone sets the two runs apart.

    Its norms compute the standard norm, bitwise. After the last step it leaves a plain model.

    Attributes:
        start: optimizer step at which the levels are fixed, k_start of the taper that this is a control for.
        steps: number of optimizer steps.
    """

    start: int  # set by whoever attaches
    steps: int

    def set_step(self, step: int) -> None:
        """Fix the levels from `start` on, and detach after the last step.

        Raises:
            UserError: nothing was observed before `start`.
        """
        if step >= self.start and not self.calibrated:
            self.calibrate()
        if step >= self.steps:
            self.detach()


def attach_control(model: nn.Module, job: TaperJob, *, fixed_at: int) -> LevelledControl:
    """Attach the level loss of `job` at the norms that its taper would replace, and return what drives it.

    Args:
        fixed_at: optimizer step at which the levels are fixed.

    Raises:
        UserError: the model cannot be tapered.
    """
    control = attach_norms(
        model,
        select_norms(model, final=job.final, sites=job.sites),
        schedule=None,
        ema_rate=job.train.ema_rate,
        level_weight=job.level_weight,
        kind=LevelledControl,
    )
    assert isinstance(control, LevelledControl)
    control.start, control.steps = fixed_at, job.steps
    return control
