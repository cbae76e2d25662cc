"""The run folder of a training job: its lock, resume state and published results (method.md section 9).

A running job keeps checkpoints and growing metrics in `resume/{fingerprint}/` beside its results. Workflow engines
delete declared outputs before each start, so none of these is declared. The folder belongs to one job (`outputs`).
Another job is refused there while it holds results or checkpoints of the first.
"""

import json
import math
import resource
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tapernorm.checkpoints.store import save
from tapernorm.models.decoder import parameter_count
from tapernorm.util.atomic_files import discard, read_json, remove_partials, sha256_of, whole_file, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json, digest
from tapernorm.util.provenance import code_commit, provenance

from ..config.sections import Strict
from .device import device_name
from .outputs import Work, output_folder
from .ranks import from_leader
from .run_lock import require_folders
from .stop_signals import too_late
from .trainer import Trainer
from .validation_loss import Evaluation

SCHEMA_VERSION = 1
RESULT_FILES = ("metrics.jsonl", "model.safetensors", "config.json", "result.json")
_NUMERICS = 2  # raise it when the code changes a job's numbers, so that checkpoints of older code are refused


def training_work(kind: str, job: Strict, data: Any) -> Work:
    """Return a training as the owner of its folder; its identity is everything that defines its numbers.

    Args:
        kind: kind of its output, a key of `outputs.FILES`.
        job: its settings.
        data: hashes of its data.
    """
    identity = {"numerics": _NUMERICS, "job": job.model_dump(mode="json"), "data": data}
    return Work(kind, json.loads(canonical_json(identity)))


def fingerprint_of(job: Strict, data: Any) -> str:
    """Return the digest of everything that defines a job's numbers: settings, data and `_NUMERICS`."""
    return training_work("", job, data).fingerprint


def run_training(
    work: Work,
    job: Strict,
    out: Path,
    make_trainer: Callable[[], Trainer],
    details: Callable[[Trainer], dict[str, Any]],
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Take `out` for `work`, then run or resume the training there as `train_in` does, and return the result.

    Args:
        overwrite: delete another job's results and checkpoints in `out`.

    Raises:
        UserError: as `train_in`; or `out` belongs to another job, or another process holds it.
    """
    with ExitStack() as held:
        from_leader(lambda: held.enter_context(output_folder(out, work, overwrite=overwrite)))
        return train_in(out, work.kind, job, work.fingerprint, make_trainer, details)


def train_in(
    out: Path,
    kind: str,
    job: Strict,
    fingerprint: str,
    make_trainer: Callable[[], Trainer],
    details: Callable[[Trainer], dict[str, Any]],
    *,
    derived: Sequence[str] = (),
) -> dict[str, Any]:
    """Run or resume the trainer that `make_trainer` builds, and publish its results into `out`.

    The caller holds `out`. Every rank returns the result; only rank 0 writes.

    Args:
        out: run folder.
        kind: the `kind` in result.json.
        job: settings of the training.
        fingerprint: digest of everything that defines the numbers; a checkpoint with another one is refused.
        make_trainer: builds the trainer; not called if `out` holds the finished run.
        details: further entries of result.json, besides job, values and provenance.
        derived: names of files made from the results, which are removed if an earlier run left them.

    Raises:
        UserError: result.json is damaged, `out` was deleted or moved, or the run diverged.
    """
    if (done := from_leader(lambda: _finished(out, fingerprint))) is not None:
        return done
    commit = code_commit()  # taken now, because the checkout may change during a long training
    trainer = make_trainer()
    score = trainer.run()

    def publish() -> dict[str, Any]:
        described = {"kind": kind, "job": job.model_dump(mode="json"), "values": _values(trainer, score)}
        described |= details(trainer)
        origin = provenance(
            config_hash=digest(canonical_json(job)),
            device=device_name(trainer.device),
            hardware=trainer.plan.hardware.model_dump(mode="json"),
            seed=trainer.plan.seed,
            fingerprint=fingerprint,
            commit=commit,
        )
        return _publish(out, trainer, described, origin, derived)

    return from_leader(publish)


def _finished(out: Path, fingerprint: str) -> dict[str, Any] | None:
    """Return the result in `out` if it is this run's and its files are undamaged, else None.

    A damaged config.json is written again.

    Raises:
        UserError: result.json is damaged.
    """
    remove_partials(out / "resume" / fingerprint)
    result = read_json(out / "result.json") if (out / "result.json").is_file() else None
    if result is None or result["provenance"].get("fingerprint") != fingerprint or "diverged" in result:
        return None  # no result, another run's, or a diverged run, which the trainer refuses again
    for name, entry in result["files"].items():
        if _is_whole(out / name, entry):
            continue
        if name != "config.json":
            print(f"{out / name} is missing or damaged: the run is trained again", file=sys.stderr)
            return None
        write_json(out / name, result["config"])
    too_late()
    print(f"{out} already holds the finished run: nothing to do", file=sys.stderr)
    discard(out / "resume")
    return result


def _publish(
    out: Path, trainer: Trainer, described: dict[str, Any], origin: dict[str, Any], derived: Sequence[str]
) -> dict[str, Any]:
    """Write the results of a run into `out`, result.json last."""
    require_folders()
    for name in ("result.json", *derived):  # result.json must never stand beside files of another run
        discard(out / name)
    with whole_file(out / "metrics.jsonl") as temporary:
        shutil.copyfile(trainer.plan.folder / "metrics.jsonl", temporary)
    save(trainer.model, out)
    paths = [out / name for name in (*RESULT_FILES[:-1], "generation_config.json") if (out / name).is_file()]
    result = {
        "schema_version": SCHEMA_VERSION,
        **described,
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths},
        "config": read_json(out / "config.json"),
        "provenance": origin,
    }
    too_late()  # a job that stops from here on would lose its checkpoints, and its results to the workflow engine
    write_json(out / "result.json", result)
    discard(out / "resume")
    return result


def _is_whole(path: Path, entry: Mapping[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == entry["bytes"] and sha256_of(path) == entry["sha256"]


def require_vocabulary(vocab_size: int, manifest: dict[str, Any], folder: Path) -> None:
    """Raise UserError if a model's vocabulary size differs from that of the tokens in `folder`, by their manifest."""
    if manifest["vocab_size"] != vocab_size:
        raise UserError(
            f"{folder} has a vocabulary of {manifest['vocab_size']}, but the model one of {vocab_size}: "
            "run `tapernorm tokens` with the model's tokenizer, or use another model"
        )


def data_hashes(manifest: dict[str, Any]) -> dict[str, str]:
    """Return a mapping from split to the sha256 of its tokens, from the manifest of a token folder."""
    return {name: split["sha256"] for name, split in manifest["splits"].items()}


def _values(trainer: Trainer, score: Evaluation) -> dict[str, dict[str, Any]]:
    tokens = trainer.plan.steps * trainer.plan.tokens_per_step
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
    return {
        name: {"value": value if math.isfinite(value) else None, "unit": unit}
        for name, (value, unit) in values.items()
        if value is not None
    }


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
