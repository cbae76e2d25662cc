"""One pre-training job: build and train the model of its variant, and score it at g = 0 (method.md section 9)."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapernorm.architectures import select_norms
from tapernorm.models.decoder import Decoder
from tapernorm.scale_loss import relative_target_loss
from tapernorm.taper import Taper, attach_norms
from tapernorm.util.rng import generator

from ..config.jobs import PretrainJob, horizon_warning
from ..config.sections import HardwareConfig, Strict
from ..data.token_stream import TokenStream, windows
from ..training.device import take_device
from ..training.norm_driver import TaperDriver, norms_told
from ..training.plan import Optimisation, plan_on_stream
from ..training.ranks import leads
from ..training.run_folder import data_hashes, require_vocabulary, run_training, training_work
from ..training.trainer import Trainer
from ..training.validation_loss import Evaluation, scoring_windows
from .radial_gradient import radial_share
from .taper_start_jump import ScoredTaper

_RADIAL_TOKENS = 1024  # tokens of the validation split that Prop. 4.1 is measured on


def pretrain(
    job: PretrainJob, tokens: Path, out: Path, hardware: HardwareConfig, *, overwrite: bool = False
) -> dict[str, Any]:
    """Run or resume `job` on the token streams in `tokens`, write its results to `out`, and return them.

    Raises:
        UserError: the streams do not fit the job, another process holds `out`, or the run diverged. `out` belongs to
            another job, and `overwrite` is not set.
    """

    def drive(model: Decoder, _: Callable[[], Evaluation]) -> Taper | None:
        return attach_variant(model, job)

    return train_decoder("pretrain", job, job, _unchanged, drive, tokens, out, hardware, overwrite=overwrite)


def _unchanged(model: Decoder) -> None:
    """Do nothing: the paper's variants change a model only by attaching a taper."""


def train_decoder(
    kind: str,
    identity: Strict,
    job: PretrainJob,
    prepare: Callable[[Decoder], None],
    drive: Callable[[Decoder, Callable[[], Evaluation]], Taper | None],
    tokens: Path,
    out: Path,
    hardware: HardwareConfig,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Run or resume one training of a decoder, write its results to `out`, and return them.

    Args:
        kind: the `kind` in result.json.
        identity: everything that defines the numbers, including `job`; checkpoints and result.json belong to it.
        job: settings of the training.
        prepare: changes the fresh model in place.
        drive: attaches the taper; its second argument is a function that scores the model.
        tokens, out, hardware, overwrite: as for `pretrain`.

    Raises:
        UserError: as `pretrain`.
    """
    device = take_device(hardware.device, hardware.threads)
    train_stream, valid_stream = (TokenStream.open(tokens, split) for split in ("train", "valid"))
    require_vocabulary(job.model.vocab_size, train_stream.manifest, tokens)

    shape = {"batch": job.train.batch, "context": job.model.context}
    windows(train_stream, seed=job.seed, step=0, **shape)  # refuses a stream that is too short before any work
    work = training_work(kind, identity, data_hashes(train_stream.manifest))

    def make_trainer() -> Trainer:
        model = Decoder(job.model).initialize(generator(job.seed, "init"))
        prepare(model)
        model.to(device)

        plan = plan_on_stream(
            model,
            train_stream,
            valid_stream,
            out,
            label=f"{job.variant} d{job.model.d_model} seed{job.seed}",
            seed=job.seed,
            steps=job.steps,
            optimisation=Optimisation.of_pretraining(job.train, job.steps),
            hardware=hardware,
            fingerprint=work.fingerprint,
            **shape,
        )
        return Trainer(model, drive(model, plan.validate), plan)

    def details(trainer: Trainer) -> dict[str, Any]:
        some = max(1, _RADIAL_TOKENS // job.model.context)
        inputs, targets = next(scoring_windows(valid_stream.tokens, context=job.model.context, batch=some))
        share = radial_share(trainer.model, inputs.to(device), targets.to(device))
        return {**taper_details(trainer), "radial": {"share": share, "tokens": targets.numel()}}

    return run_training(work, identity, out, make_trainer, details, overwrite=overwrite)


def attach_variant(model: Decoder, job: PretrainJob, *, kind: type[Taper] = Taper) -> Taper | None:
    """Attach the taper of the job's variant, of the class `kind`; the Baseline has none.

    Where no norm is tapered, it has the scale loss alone: the Baseline with that loss is what a variant (+aux) is to be
    compared with, because it changes two things at once.
    """
    if job.taper is None:
        return None
    if leads() and (warning := horizon_warning([job])):
        print(warning, file=sys.stderr)
    taper = attach_norms(
        model,
        select_norms(model, final=job.variant.final, sites=None if job.variant.internal else ()),
        kind=kind,
        schedule=job.schedule_of(job.taper),
        ema_rate=job.ema_rate_of(job.taper),
        anchor_weight=job.taper.anchor_weight,
    )
    if job.variant.anchor == "relative":
        taper.scale_loss = relative_target_loss
    return taper


def taper_details(trainer: Trainer) -> dict[str, Any]:
    """Return the entries of result.json about the norms, and about the scores at the start of the taper."""
    taper = trainer.driver.taper if isinstance(trainer.driver, TaperDriver) else None
    start = {"taper_start": taper.values()} if isinstance(taper, ScoredTaper) else {}
    return {**start, **norms_told(trainer.driver)}
