"""`inspect_inference` of every run of a study's stage, each in a row: the numbers behind Table S2's further columns."""

from pathlib import Path
from typing import Any

from tapernorm.checkpoints.store import load
from tapernorm.models.decoder import Decoder
from tapernorm.util.atomic_files import read_json
from tapernorm.util.errors import UserError

from ...config.study_runs import StageJob
from ...data.token_stream import TokenStream
from ...training.device import take_device
from ...training.run_folder import require_vocabulary
from .inference_graph import inspect_inference


def stage_oddities(job: StageJob, results: Path, tokens: Path, *, device: str, threads: int) -> list[dict[str, Any]]:
    """A row per run of the stage that finished; one that diverged left no model, and has a row that says so.

    Args:
        results: results folder of the study's run.
        tokens: token streams that the models were trained on; the validation split is read.

    Raises:
        UserError: a run is missing, is of another job than the stage's, or has another vocabulary.
    """
    chosen = take_device(device, threads)
    stream = TokenStream.open(tokens, "valid")
    rows = []
    for run in job.runs:
        folder = results / run.folder
        if not (folder / "result.json").is_file():
            raise UserError(f"{folder} holds no result.json: run arm {run.arm}, seed {run.seed}, first")
        result = read_json(folder / "result.json")
        if (found := result["provenance"]["config_hash"]) != run.config_hash:
            raise UserError(
                f"{folder} is of a job with the hash {found} and the config's arm {run.arm} has {run.config_hash}: "
                "run it again, or take the config that it was run with"
            )
        row = {
            "run": job.run,
            "stage": job.stage.name,
            "arm": run.arm,
            "seed": run.seed,
            "config_hash": run.config_hash,
        }
        if "diverged" in result:
            rows.append(row | {"outcome": "diverged"})
            continue
        model = load(folder, Decoder).to(chosen)
        require_vocabulary(model.config.vocab_size, stream.manifest, tokens)
        rows.append(row | {"outcome": "finished"} | _flat(inspect_inference(model, stream.tokens)))
    return rows


def _flat(found: dict[str, Any]) -> dict[str, Any]:
    operations = {f"operations_{name}": count for name, count in found["operations"].items()}
    outcomes = {f"{rows}_{name}": v for rows, numbers in found["outcomes"].items() for name, v in numbers.items()}
    return operations | outcomes
