"""Results of a stage's runs -> tidy rows, one per arm and seed, a diverged one among them; and these back from CSV."""

from pathlib import Path
from typing import Any

import pandas as pd

from tapernorm.util.atomic_files import whole_file
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json

from ...config.study import Arm
from ...config.study_runs import ArmRun, StageJob
from ..read_json import read_csv, read_document, value_at

FINISHED, DIVERGED = "finished", "diverged"

# Column -> place in the settings of the job; those of a taper are absent for a Baseline.
_SETTINGS = {
    "steps": "steps",
    "lr": "train.lr",
    "clip_norm": "train.clip_norm",
    "start_fraction": "taper.start_fraction",
    "end_fraction": "taper.end_fraction",
    "anchor_weight": "taper.anchor_weight",
}
# Column -> place in the result of a run that finished.
_VALUES = {
    "valid_ce": "values.valid_ce",  # nats/token, at g = 0 where tapered
    "bits_per_byte": "values.bits_per_byte",
    "valid_tokens": "values.valid_tokens",
    "parameters": "values.parameters",
    "train_time_s": "values.train_time_s",
    "scale_target": "scale_target",
}
_START = "taper_start_jump"  # nats/token: validation loss at g = 0 less that at g = 1, where the taper starts
_PROVENANCE = {
    "device": "provenance.device",
    "config_hash": "provenance.config_hash",
    "commit": "provenance.commit",  # null outside git
    "torch": "provenance.packages.torch",
}
_TEXT = (
    *("run", "stage", "arm", "label", "variant", "treatment", "outcome", "reason", "folder"),
    *("device", "config_hash", "commit", "torch"),
)
_INTEGERS = ("d_model", "seed", "diverged_at", "steps", "valid_tokens", "parameters")
_TYPES: dict[str, str] = dict.fromkeys(_TEXT, "str") | dict.fromkeys(_INTEGERS, "Int64")

Row = dict[str, Any]


def collect(job: StageJob, results: Path) -> pd.DataFrame:
    """Read the result of every run of a stage, below the folder `results` of the run.

    Raises:
        UserError: a file is missing, damaged or of another job than the stage's.
    """
    return _typed(pd.DataFrame([_row(job, run, results) for run in job.runs]))


def _row(job: StageJob, run: ArmRun, results: Path) -> Row:
    path = results / run.folder / "result.json"
    document = read_document(path, "pretrain", "arm")
    if (found := value_at(document, "provenance.config_hash", path)) != run.config_hash:
        raise UserError(
            f"{path} is of a job with the hash {found} and the config's arm {run.arm} has {run.config_hash}: "
            "run it again, or take the config that it was run with"
        )
    arm = job.stage.arm(run.arm)
    settings = value_at(document, "job" if document["kind"] == "pretrain" else "job.pretrain", path)
    stopped = document.get("diverged")
    row = {
        "run": job.run,
        "stage": job.stage.name,
        "arm": run.arm,
        "label": arm.label,
        "variant": arm.variant,
        "treatment": treatment_of(arm),
        "d_model": job.stage.d_model,
        "seed": run.seed,
        "outcome": DIVERGED if stopped else FINISHED,
        "diverged_at": stopped["step"] if stopped else None,
        "reason": f"{stopped['what']} is not finite" if stopped else None,
        **{column: _setting(settings, place, path) for column, place in _SETTINGS.items()},
        **{column: None if stopped else value_at(document, place, path) for column, place in _VALUES.items()},
        _START: value_at(document["taper_start"], f"{_START}.value", path) if "taper_start" in document else None,
        "folder": run.folder,
        **{column: value_at(document, place, path) for column, place in _PROVENANCE.items()},
    }
    return row | _unused(arm, row)


def _unused(arm: Arm, row: Row) -> Row:
    """What the result of a run tells and the run did not use: a target without its loss, an end without a taper."""
    unused: Row = {} if row["anchor_weight"] else {"scale_target": None}
    if arm.treatment is not None and arm.treatment.anchor_only:
        unused |= {"end_fraction": None}
    return unused


def treatment_of(arm: Arm) -> str | None:
    """An arm's treatment as text."""
    return None if arm.treatment is None else canonical_json(arm.treatment)


def _setting(settings: Row, place: str, path: Path) -> Any:
    section = place.partition(".")[0]
    return None if settings[section] is None else value_at(settings, place, path)


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Text as text, counts as integers that may be missing, all else as numbers: as `read` gives them back."""
    return frame.astype({column: _TYPES.get(column, "float64") for column in frame.columns})


def write(rows: pd.DataFrame, path: Path) -> None:
    """Write the rows as CSV, each float in the shortest form that reads back as the same bits."""
    with whole_file(path) as temporary:
        rows.to_csv(temporary, index=False, lineterminator="\n")


def read(path: Path, job: StageJob) -> pd.DataFrame:
    """Read back what `write` wrote of the stage of `job`.

    Raises:
        UserError: there is no such file, or it holds other runs than the stage's.
    """
    identity = ["run", "stage", "arm", "seed", "config_hash"]
    frame = read_csv(path, identity, text=_TEXT, verb=f"rows {path.stem}")
    found = {(r["run"], r["stage"], r["arm"], r["seed"], r["config_hash"]) for r in frame.to_dict("records")}
    wanted = {(job.run, job.stage.name, run.arm, run.seed, run.config_hash) for run in job.runs}
    if unlike := sorted({f"{arm} of {stage}, run {name}" for name, stage, arm, *_ in found ^ wanted}):
        raise UserError(
            f"{path} and the config differ in arms ({'; '.join(unlike)}): gather the rows again, or take the config "
            "that they were gathered with"
        )
    return _typed(frame)
