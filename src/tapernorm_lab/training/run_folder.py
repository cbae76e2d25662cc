"""The run folder of a training job: one process at a time, resume, publication of the results (method.md section 9).

A running job keeps `resume/{fingerprint}/` beside its results: checkpoints and growing metrics. Workflow engines delete
declared outputs before each start, so none of these is declared. The folder belongs to one job (`outputs`): another job
is refused there while results or checkpoints of the first one lie in it.
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
_NUMERICS = 2  # raised when the code changes what a job computes: checkpoints of older code then never load


def training_work(kind: str, job: Strict, data: Any) -> Work:
    """A training as the owner of its folder: its identity is all that defines its numbers.

    Args:
        data: hashes of what it trains on.
    """
    identity = {"numerics": _NUMERICS, "job": job.model_dump(mode="json"), "data": data}
    return Work(kind, json.loads(canonical_json(identity)))


def fingerprint_of(job: Strict, data: Any) -> str:
    """Digest of everything that defines a job's numbers: settings, data, and what the code computes."""
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
    """Take `out` for `work`, then run (or resume) it there as `train_in` does; returns the result.

    Args:
        overwrite: delete another job's results and checkpoints in `out`.

    Raises:
        UserError: as `train_in`; or `out` is another job's, or another process holds it.
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
    """Run (or resume) the trainer that `make_trainer` builds; publish into `out`, which is held.

    Args:
        kind: what result.json says it is.
        fingerprint: digest of all that defines the numbers; checkpoints of others never load.
        details: what result.json holds besides the job, its values and its provenance.
        derived: what may lie in `out` that was made from the results: an earlier run's is removed.

    Returns the result, on every rank that trains, of which rank 0 alone writes.

    Raises:
        UserError: result.json is damaged, `out` was deleted or moved meanwhile, or the run diverged.
    """
    if (done := from_leader(lambda: _finished(out, fingerprint))) is not None:
        return done
    commit = code_commit()  # of what runs here: by the end of a long training, other code may lie in its place
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
    """The result in `out`, if it is this run's and its files are whole; a damaged config.json is written again.

    Raises:
        UserError: result.json is damaged.
    """
    remove_partials(out / "resume" / fingerprint)
    result = read_json(out / "result.json") if (out / "result.json").is_file() else None
    if result is None or result["provenance"].get("fingerprint") != fingerprint or "diverged" in result:
        return None  # nothing, another run's, or one whose marker says again that it diverged
    for name, entry in result["files"].items():
        if _is_whole(out / name, entry):
            continue
        if name != "config.json":
            print(f"{out / name} is missing or damaged: the run is trained again", file=sys.stderr)
            return None
        write_json(out / name, result["config"])
    too_late()
    print(f"{out} holds this very run, finished: nothing to do", file=sys.stderr)
    discard(out / "resume")
    return result


def _publish(
    out: Path, trainer: Trainer, described: dict[str, Any], origin: dict[str, Any], derived: Sequence[str]
) -> dict[str, Any]:
    """Write the results of a run into `out`, result.json last."""
    require_folders()
    for name in ("result.json", *derived):  # an earlier run's: it vouches for the files beside it
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
    too_late()  # the results of a job that fails are deleted by workflow engines, and its checkpoints go now
    write_json(out / "result.json", result)
    discard(out / "resume")
    return result


def _is_whole(path: Path, entry: Mapping[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == entry["bytes"] and sha256_of(path) == entry["sha256"]


def require_vocabulary(vocab_size: int, manifest: dict[str, Any], folder: Path) -> None:
    """Raise UserError where a model's vocabulary is not that of the tokens in `folder`, by their manifest."""
    if manifest["vocab_size"] != vocab_size:
        raise UserError(
            f"{folder} has a vocabulary of {manifest['vocab_size']} and the model one of {vocab_size}: "
            "make the tokens again with the model's tokenizer, or take another model"
        )


def data_hashes(manifest: dict[str, Any]) -> dict[str, str]:
    """Split -> sha256 of its tokens, from the manifest of a token folder."""
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
