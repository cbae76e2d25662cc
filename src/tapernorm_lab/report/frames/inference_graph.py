"""Inference graphs of a stage's models, and their outputs on odd inputs: one row per arm and seed."""

from collections.abc import Sequence
from pathlib import Path

from ...config.study_runs import StageJob
from ..engine.frame import Field, Frame, Row, integer, number, records, text
from .study_stages import require_runs

FUNCTIONS = ("norm", "tanh", "erf", "exp")
ROWS = {  # kind of rows -> header
    "text": "text",
    "longer": "past context",
    "same": "one token",
    "random": "random ids",
}


def _outcome(kind: str) -> dict[str, Field]:
    """Return the fields of one kind of rows. A number is missing if not every logit is finite."""
    return {
        f"{kind}_finite": Field("flag"),
        f"{kind}_ce": number(unit="nats/token"),
        f"{kind}_ce_max": number(unit="nats/token"),
        f"{kind}_logit_max": number(),
        f"{kind}_activation_max": number(),
    }


FRAME = Frame(
    file="study_{}_oddities.csv",
    key=("run", "stage", "arm", "seed", "config_hash"),
    verb="rows study_STAGE_oddities",
    fields={
        **{name: text() for name in ("run", "stage", "arm", "config_hash", "outcome")},
        "seed": integer(),
        **{f"operations_{name}": integer() for name in (*FUNCTIONS, "all")},
        **{name: field for kind in ROWS for name, field in _outcome(kind).items()},
    },
)


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as CSV."""
    FRAME.write(FRAME.typed(rows), path)


def read(path: Path, job: StageJob) -> list[Row]:
    """Read the rows of the stage of `job`, with None for missing values. Raises as `study_stages.read`."""
    frame = FRAME.read(path)
    require_runs(frame, job, path)
    return records(frame)
