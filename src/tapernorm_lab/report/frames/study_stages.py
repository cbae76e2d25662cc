"""Stages of the study: from the results of a stage to one row per arm and seed, diverged runs included."""

from pathlib import Path

import pandas as pd

from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json

from ...config.study import Arm
from ...config.study_runs import ArmRun, StageJob
from ..engine.frame import PROVENANCE, Frame, Row, integer, number, text
from ..provenance import linear_kernel
from ..read_json import read_document, value_at

FINISHED, DIVERGED = "finished", "diverged"

_START = "taper_start_jump"
FRAME = Frame(
    file="study_{}.csv",
    key=("run", "stage", "arm", "seed", "config_hash"),
    verb="rows study_STAGE",
    fields={
        **{name: text() for name in ("run", "stage", "arm", "label", "variant", "treatment")},
        "d_model": integer(),
        "seed": integer(),
        "outcome": text(),
        "diverged_at": integer(unit="step"),
        "reason": text(),
        # Settings of the job; a Baseline has none of a taper.
        "steps": integer("steps", of="settings"),
        "lr": number("train.lr", of="settings"),
        "clip_norm": number("train.clip_norm", of="settings"),
        "start_fraction": number("taper.start_fraction", of="settings"),
        "end_fraction": number("taper.end_fraction", of="settings"),
        "anchor_weight": number("taper.anchor_weight", of="settings"),
        # Values of a finished run.
        "valid_ce": number("values.valid_ce", "nats/token", of="finished"),  # at g = 0 where tapered
        "bits_per_byte": number("values.bits_per_byte", of="finished"),
        "valid_tokens": integer("values.valid_tokens", of="finished"),
        "parameters": integer("values.parameters", of="finished"),
        "train_time_s": number("values.train_time_s", "s", of="finished"),
        "scale_target": number("scale_target", of="finished"),
        _START: number(unit="nats/token"),  # validation loss at g = 0 less that at g = 1, where the taper starts
        "folder": text(),
        **PROVENANCE,
        "linear": text(),
    },
)


def collect(job: StageJob, results: Path) -> pd.DataFrame:
    """Read the result of every run of a stage, from the folder `results` of the run.

    Raises:
        UserError: a file is missing, damaged or of another job than the stage's.
    """
    return FRAME.typed([_row(job, run, results) for run in job.runs])


def _row(job: StageJob, run: ArmRun, results: Path) -> Row:
    path = results / run.folder / "result.json"
    document = read_document(path, "pretrain", "arm")
    if (found := value_at(document, "provenance.config_hash", path)) != run.config_hash:
        raise UserError(
            f"{path} is of a job with the hash {found}, and arm {run.arm} of the config has {run.config_hash}: "
            "run it again, or give the config that it was run with"
        )
    arm = job.stage.arm(run.arm)
    settings = value_at(document, "job" if document["kind"] == "pretrain" else "job.pretrain", path)
    stopped = document.get("diverged")
    row = {
        "run": job.run,
        "stage": job.stage.name,
        "arm": run.arm,
        "label": arm.label,
        "variant": arm.variant.name,
        "treatment": treatment_of(arm),
        "d_model": job.stage.d_model,
        "seed": run.seed,
        "outcome": DIVERGED if stopped else FINISHED,
        "diverged_at": stopped["step"] if stopped else None,
        "reason": f"{stopped['what']} is not finite" if stopped else None,
        **_settings(settings, path),
        **(FRAME.absent("finished") if stopped else FRAME.facts(document, path, of="finished")),
        _START: value_at(document["taper_start"], f"{_START}.value", path) if "taper_start" in document else None,
        "folder": run.folder,
        **FRAME.facts(document, path),
        "linear": linear_kernel(document),
    }
    return row | _unused(arm, row)


def _unused(arm: Arm, row: Row) -> Row:
    """Return None for values that the run did not use: a target without scale loss, an end without taper."""
    unused: Row = {} if row["anchor_weight"] else {"scale_target": None}
    if not arm.variant.tapers:
        unused |= {"end_fraction": None}
    return unused


def treatment_of(arm: Arm) -> str | None:
    """Return the treatment of an arm as text."""
    return None if arm.treatment is None else canonical_json(arm.treatment)


def _settings(settings: Row, path: Path) -> Row:
    """Return the settings of a job, with None for those of a missing taper."""
    untapered = {"taper": dict.fromkeys(("start_fraction", "end_fraction", "anchor_weight"))}
    return FRAME.facts(settings | (untapered if settings["taper"] is None else {}), path, of="settings")


def write(rows: pd.DataFrame, path: Path) -> None:
    """Write the rows as CSV."""
    FRAME.write(rows, path)


def read(path: Path, job: StageJob) -> pd.DataFrame:
    """Read the CSV of the stage of `job`.

    Raises:
        UserError: the file is missing, or holds other runs than the stage's.
    """
    frame = FRAME.read(path)
    require_runs(frame, job, path)
    return frame


def require_runs(frame: pd.DataFrame, job: StageJob, path: Path) -> None:
    """Refuse rows of other runs than the stage's."""
    found = set(frame[["run", "stage", "arm", "seed", "config_hash"]].itertuples(index=False, name=None))
    wanted = {(job.run, job.stage.name, run.arm, run.seed, run.config_hash) for run in job.runs}
    if unlike := sorted({f"{arm} of {stage}, run {name}" for name, stage, arm, *_ in found ^ wanted}):
        raise UserError(
            f"{path} and the config differ in arms ({'; '.join(unlike)}): gather the rows again, or give the config "
            "that they were gathered with"
        )
