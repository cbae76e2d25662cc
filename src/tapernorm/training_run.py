"""The shell of every training job: one process per folder, resume, publication of the results (method.md section 9).

Beside its results, a running job keeps `resume/{fingerprint}/` (checkpoints and growing metrics). Workflow
engines delete declared outputs before each start, so none of it is declared; another config has
another fingerprint and never meets it.
"""

import math
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .errors import UserError
from .evaluate import Evaluation
from .files import discard, read_json, remove_partials, whole_file, write_json
from .identity import canonical_json, digest
from .models.llama import parameter_count
from .models.store import save
from .provenance import code_commit, provenance
from .ranks import from_leader
from .runlock import run_lock
from .settings import Strict
from .stopping import too_late
from .train import Trainer

SCHEMA_VERSION = 1
RESULT_FILES = ("metrics.jsonl", "model.safetensors", "config.json", "result.json")
_NUMERICS = 2  # raised when the code changes what a job computes: checkpoints of older code then never load


def fingerprint_of(job: Strict, data: Any) -> str:
    """Digest of everything that defines a job's numbers: settings, data, and what the code computes."""
    return digest({"numerics": _NUMERICS, "job": job.model_dump(mode="json"), "data": data})


def run_training(
    kind: str,
    job: Strict,
    out: Path,
    fingerprint: str,
    make_trainer: Callable[[Path], Trainer],
    details: Callable[[Trainer], dict[str, Any]],
    *,
    told: Sequence[str] = (),
) -> dict[str, Any]:
    """Run (or resume) the trainer that `make_trainer` builds for its resume folder; publish into `out`.

    Args:
        kind: what result.json says it is.
        details: what result.json holds besides the job, its values and its provenance.
        told: what may lie in `out` that others made from the results: an earlier run's is removed.

    Returns the result, on every rank that trains, of which rank 0 alone holds the lock and writes.

    Raises:
        UserError: another process holds `out`, or the run diverged.
    """
    with ExitStack() as held:
        if (done := from_leader(lambda: _claim(held, out, fingerprint))) is not None:
            return done
        commit = code_commit()  # of what runs here: by the end of a long training, other code may lie in its place
        trainer = make_trainer(out / "resume" / fingerprint)
        score = trainer.run()
        facts = {"fingerprint": fingerprint, "commit": commit}
        return from_leader(lambda: _publish(kind, job, out, facts, trainer, score, details(trainer), told))


def _claim(held: ExitStack, out: Path, fingerprint: str) -> dict[str, Any] | None:
    """Lock `out` for as long as `held` is; the result in it, if it is this run's."""
    held.enter_context(run_lock(out))
    if (done := _finished(out, fingerprint)) is not None:
        too_late()
        print(f"{out} holds this very run, finished: nothing to do", file=sys.stderr)
        discard(out / "resume")
        return done
    remove_partials(out / "resume" / fingerprint)
    return None


def _publish(
    kind: str,
    job: Strict,
    out: Path,
    facts: dict[str, Any],
    trainer: Trainer,
    score: Evaluation,
    details: dict[str, Any],
    told: Sequence[str],
) -> dict[str, Any]:
    """Write the results of a run into `out`, result.json last; `facts` go into its provenance."""
    result = {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "job": job.model_dump(mode="json"),
        "values": _values(trainer, score),
        **details,
        "provenance": provenance(
            config_hash=digest(canonical_json(job)),
            device=_device_name(trainer.device),
            hardware=trainer.plan.hardware.model_dump(mode="json"),
            seed=trainer.plan.seed,
            **facts,
        ),
    }
    (out / "result.json").unlink(missing_ok=True)  # an earlier run's: it vouches for the files beside it
    for name in told:
        discard(out / name)
    with whole_file(out / "metrics.jsonl") as temporary:
        shutil.copyfile(trainer.plan.folder / "metrics.jsonl", temporary)
    save(trainer.model, out)
    too_late()  # the results of a job that fails are deleted by workflow engines, and its checkpoints go now
    write_json(out / "result.json", result)
    discard(out / "resume")
    return result


def _finished(out: Path, fingerprint: str) -> dict[str, Any] | None:
    """The result in `out`, if it is this run's and all its files are there; result.json is written last."""
    if not all((out / name).is_file() for name in RESULT_FILES):
        return None
    result = read_json(out / "result.json")
    return result if result["provenance"].get("fingerprint") == fingerprint else None


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


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
