"""One pre-training job: build the model of its variant, train it, score it at g = 0, publish (method.md section 9)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .arch import select_norms
from .compute import take_device
from .data.tokens import TokenStream, windows
from .driver import NormDriver
from .evaluate import Evaluation, evaluate, scoring_windows
from .jobs import PretrainJob
from .lossjump import ScoredTaper
from .models.llama import Decoder
from .optimisation import Optimisation
from .radial import radial_share
from .rng import generator
from .schedule import GateSchedule
from .settings import HardwareConfig, Strict
from .taper import Taper, attach_norms
from .train import Plan, Trainer
from .training_run import data_hashes, fingerprint_of, require_vocabulary, run_training

_RADIAL_TOKENS = 1024  # of the validation split, on which Prop. 4.1 is measured


def pretrain(job: PretrainJob, tokens: Path, out: Path, hardware: HardwareConfig) -> dict[str, Any]:
    """Run (or resume) `job` on the token streams in `tokens`; write its results to `out` and return them.

    Raises:
        UserError: the streams do not fit the job, another process holds `out`, or the run diverged.
    """
    return train_decoder(
        "pretrain", job, job, _unchanged, lambda model, _: attach_variant(model, job), tokens, out, hardware
    )


def _unchanged(model: Decoder) -> None:
    """The paper's variants change nothing in a model but its norms, by attaching."""


def train_decoder(
    kind: str,
    identity: Strict,
    job: PretrainJob,
    prepare: Callable[[Decoder], None],
    drive: Callable[[Decoder, Callable[[], Evaluation]], NormDriver | None],
    tokens: Path,
    out: Path,
    hardware: HardwareConfig,
) -> dict[str, Any]:
    """Run (or resume) one training of a decoder; write its results to `out` and return them.

    Args:
        kind: what result.json says it is.
        identity: all that defines its numbers, `job` and more: what its checkpoints and result.json are of.
        job: how it is trained.
        prepare: changes the fresh model.
        drive: gives it what drives its norms; that may score the model by the function that it gets.

    Raises:
        UserError: as `pretrain`.
    """
    device = take_device(hardware.device, hardware.threads)
    train_stream, valid_stream = (TokenStream.open(tokens, split) for split in ("train", "valid"))
    require_vocabulary(job.model.vocab_size, train_stream.manifest, tokens)

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        shape = {"batch": job.train.batch, "context": job.model.context}
        both = windows(train_stream, seed=job.seed, step=step, **shape)
        return both[:, :-1], both[:, 1:]

    batch_at(0)  # a stream that is too short is refused before any work
    fingerprint = fingerprint_of(identity, data_hashes(train_stream.manifest))

    def make_trainer(folder: Path) -> Trainer:
        model = Decoder(job.model).initialize(generator(job.seed, "init"))
        prepare(model)
        model.to(device)

        def validate() -> Evaluation:
            return evaluate(
                model,
                valid_stream.tokens,
                text_bytes=valid_stream.split["bytes"],
                context=job.model.context,
                batch=job.train.batch,
                device=device,
            )

        plan = Plan(
            label=f"{job.variant} d{job.model.d_model} seed{job.seed}",
            seed=job.seed,
            steps=job.steps,
            optimisation=Optimisation.of_pretraining(job.train, job.steps),
            hardware=hardware,
            batch_at=batch_at,
            validate=validate,
            tokens_per_step=job.train.batch * job.model.context,
            fingerprint=fingerprint,
            folder=folder,
            events=out / "tensorboard" if hardware.tensorboard else None,
        )
        return Trainer(model, drive(model, validate), plan)

    def details(trainer: Trainer) -> dict[str, Any]:
        some = max(1, _RADIAL_TOKENS // job.model.context)
        inputs, targets = next(scoring_windows(valid_stream.tokens, context=job.model.context, batch=some))
        share = radial_share(trainer.model, inputs.to(device), targets.to(device))
        return {**taper_details(trainer), "radial": {"share": share, "tokens": targets.numel()}}

    return run_training(kind, identity, out, fingerprint, make_trainer, details)


def attach_variant(model: Decoder, job: PretrainJob, *, sites: Sequence[str] | None = None) -> Taper | None:
    """Attach the taper of the job's variant; the Baseline has none. `sites`: other internal norms than all of them."""
    if job.taper is None:
        return None
    return attach_norms(
        model,
        select_norms(model, final=job.variant.startswith("all"), sites=sites),
        schedule=GateSchedule.from_fractions(job.steps, job.taper.start_fraction, job.taper.end_fraction),
        ema_rate=job.taper.ema_rate,
        anchor_weight=job.taper.anchor_weight,
    )


def taper_details(trainer: Trainer) -> dict[str, Any]:
    """Each norm's constant, the scale target and what was scored at the taper start, for result.json."""
    driver = trainer.driver
    return {
        **({"taper_start": driver.values()} if isinstance(driver, ScoredTaper) else {}),
        "norms": {} if driver is None else {name: {"c": c} for name, c in driver.constants.items()},
        "scale_target": None if driver is None or driver.scale_target is None else driver.scale_target.item(),
    }
