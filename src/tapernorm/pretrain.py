"""One pre-training job: build the model of its variant, train it, score it at g = 0, publish (method.md section 9).

Beside its results, a running job keeps `resume/{fingerprint}/` (checkpoints and growing metrics). Workflow
engines delete declared outputs before each start, so none of it is declared; another config has
another fingerprint and never meets it.
"""

import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from .config import HardwareConfig, PretrainJob, canonical_json, digest
from .data.tokens import TokenStream, windows
from .errors import UserError
from .evaluate import Evaluation, evaluate
from .files import read_json, remove_partials, whole_file, write_json
from .models.llama import Decoder, parameter_count
from .models.store import save
from .provenance import provenance
from .rng import generator
from .runlock import run_lock
from .schedule import GateSchedule
from .taper import Taper, attach
from .train import Plan, Trainer, pick_device

SCHEMA_VERSION = 1
RESULT_FILES = ("metrics.jsonl", "model.safetensors", "config.json", "result.json")
_NUMERICS = 1  # raised when the code changes what a job computes: checkpoints of older code then never load


def pretrain(job: PretrainJob, tokens: Path, out: Path, hardware: HardwareConfig) -> dict[str, Any]:
    """Run (or resume) `job` on the token streams in `tokens`; write its results to `out` and return them.

    Raises:
        UserError: the streams do not fit the job, another process holds `out`, or the run diverged.
    """
    device = pick_device(hardware.device)
    torch.set_num_threads(hardware.threads)
    train_stream, valid_stream = (TokenStream.open(tokens, split) for split in ("train", "valid"))
    require_vocabulary(job.model.vocab_size, train_stream, tokens)

    def batch_at(step: int) -> torch.Tensor:
        shape = {"batch": job.train.batch, "context": job.model.context}
        return windows(train_stream, seed=job.seed, step=step, **shape)

    batch_at(0)  # a stream that is too short is refused before any work
    fingerprint = digest(
        {"numerics": _NUMERICS, "job": job.model_dump(mode="json"), "data": _data_hashes(train_stream)}
    )
    with run_lock(out):
        if (done := _finished(out, fingerprint)) is not None:
            print(f"{out} holds this very run, finished: nothing to do", file=sys.stderr)
            _discard(out / "resume")
            return done
        model = Decoder(job.model).initialize(generator(job.seed, "init")).to(device)
        taper = attach_variant(model, job)
        folder = out / "resume" / fingerprint
        remove_partials(folder)

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
            steps=job.steps,
            settings=job.train,
            hardware=hardware,
            batch_at=batch_at,
            validate=validate,
            tokens_per_step=job.train.batch * job.model.context,
            fingerprint=fingerprint,
            folder=folder,
            events=out / "tensorboard" if hardware.tensorboard else None,
        )
        trainer = Trainer(model, taper, plan)
        score = trainer.run()
        result = _result(job, trainer, score, fingerprint)
        (out / "result.json").unlink(missing_ok=True)  # an earlier run's: it vouches for the files beside it
        with whole_file(out / "metrics.jsonl") as temporary:
            shutil.copyfile(folder / "metrics.jsonl", temporary)
        save(model, out)
        write_json(out / "result.json", result)
        _discard(out / "resume")
    return result


def _finished(out: Path, fingerprint: str) -> dict[str, Any] | None:
    """The result in `out`, if it is this run's and all its files are there; result.json is written last."""
    if not all((out / name).is_file() for name in RESULT_FILES):
        return None
    result = read_json(out / "result.json")
    return result if result["provenance"].get("fingerprint") == fingerprint else None


def _discard(folder: Path) -> None:
    """Remove in one step what a killed removal must not leave in part."""
    doomed = folder.with_suffix(".done")
    shutil.rmtree(doomed, ignore_errors=True)
    if folder.exists():
        os.replace(folder, doomed)
        shutil.rmtree(doomed)


def attach_variant(model: Decoder, job: PretrainJob) -> Taper | None:
    """Attach the taper of the job's variant; the Baseline has none."""
    if job.taper is None:
        return None
    return attach(
        model,
        final=job.variant.startswith("all"),
        schedule=GateSchedule.from_fractions(job.steps, job.taper.start_fraction, job.taper.end_fraction),
        ema_rate=job.taper.ema_rate,
        anchor_weight=job.taper.anchor_weight,
    )


def require_vocabulary(vocab_size: int, stream: TokenStream, folder: Path) -> None:
    """Raise UserError where the model's vocabulary is not that of the token stream in `folder`."""
    if stream.manifest["vocab_size"] != vocab_size:
        raise UserError(
            f"{folder} has a vocabulary of {stream.manifest['vocab_size']} and the model one of "
            f"{vocab_size}: make the tokens again, or set tokenizer.vocab_size"
        )


def _data_hashes(stream: TokenStream) -> dict[str, str]:
    return {name: split["sha256"] for name, split in stream.manifest["splits"].items()}


def _result(job: PretrainJob, trainer: Trainer, score: Evaluation, fingerprint: str) -> dict[str, Any]:
    tokens = job.steps * job.train.batch * job.model.context
    values = {
        "valid_ce": (score.ce, "nats/token"),
        "bits_per_byte": (score.bits_per_byte, "bits/byte"),
        "valid_tokens": (score.tokens, "tokens"),
        "parameters": (parameter_count(trainer.model), "parameters"),
        "train_tokens": (tokens, "tokens"),
        "train_time_s": (trainer.elapsed_s, "s"),
        "tokens_per_s": (tokens / trainer.elapsed_s, "tokens/s"),
        "peak_mem_bytes": (_peak_memory(trainer.device), "bytes"),
    }
    taper = trainer.taper
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "pretrain",
        "job": job.model_dump(mode="json"),
        "values": {name: {"value": value, "unit": unit} for name, (value, unit) in values.items()},
        "norms": {} if taper is None else {name: {"c": c} for name, c in taper.constants.items()},
        "scale_target": None if taper is None else taper.scale_target.item(),
        "provenance": provenance(
            config_hash=digest(canonical_json(job)),
            fingerprint=fingerprint,
            device=_device_name(trainer.device),
            hardware=trainer.plan.hardware.model_dump(mode="json"),
            seed=job.seed,
        ),
    }


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
