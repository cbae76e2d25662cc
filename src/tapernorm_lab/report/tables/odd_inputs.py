"""Table S3: losses of finished models on odd inputs beside their Baseline's, and the same of a stage's arms.

Table S3x holds the tails of every model.
"""

from typing import Any

from ...config.odd_inputs import BASELINE, TrialsJob
from ..engine.cells import NOT_FINITE, Cell, interval, number, share, text
from ..engine.frame import Row
from ..engine.table_spec import Shown, TableSpec
from ..frames.odd_inputs import RobustnessRows
from ..frames.odd_inputs_summary import PLAIN, records, tried_on
from ..provenance import of_several_codes
from ..table import ABSENT, Table
from .odd_inputs_notes import (
    arm_notes,
    commits_of,
    table_notes,
    tail_notes,
)

_PLACE = ("d_model", "trial", "part")
SHOWN = ("internal_aux", "all_aux")  # in print, as in Table 1; the CSV and Table S3x hold every model


def table_s3(rows: RobustnessRows, job: TrialsJob) -> Table:
    """Table S3 of a run: a line per width and kind of input.

    Raises:
        UserError: there are no scores.
    """
    found = records(rows, run=job.run)
    labels = {row["model"]: row["label"] for row in found}
    shown = [model for model in SHOWN if model in labels] or [model for model in labels if model != BASELINE]
    counts = {place: sorted({row["n"] for row in found if _place(row) == place}) for place in map(_place, found)}
    spec = TableSpec(
        name="table_S3",
        line=_PLACE,
        member="model",
        printed=_is_printed,
        columns=[
            Shown("d", text("d_model"), once=["d_model"]),
            Shown("tried on", tried_on, align="l"),
            Shown("rows", text("rows")),
            Shown("n", lambda row: "/".join(map(str, counts[_place(row)]))),
            Shown("loss", _loss("ce_mean"), labels[BASELINE], of=BASELINE),
            Shown("worst row", _loss("rows_max"), labels[BASELINE], of=BASELINE),
            *(
                Shown(header, cell, labels[model], of=model)
                for model in shown
                for header, cell in {"× Baseline": RATIO, "worst row": _loss("rows_max"), "blown up": BLOWN}.items()
            ),
        ],
    )
    return spec.table(
        found,
        caption=(
            "Finished models on odd inputs, beyond the paper: does one without norms blow up where its Baseline does"
            f" not? The models are those of the run's own tables, tapered as its config's section taper says, and not"
            f" arms of the study.{of_several_codes(commits_of(rows))} Run {job.run}: {job.caption}"
        ),
        notes=table_notes(rows, found, shown),
    )


def table_s3x(rows: RobustnessRows, job: TrialsJob) -> Table:
    """Table S3x of a run: a line per kind of input and model of the widest. Raises as `table_s3`."""
    found = records(rows, run=job.run)
    widest = max(row["d_model"] for row in found)
    tails = {"median": "median", "p99.9": "p99_9", "max": "max"}
    beside = "over Baseline, same row"
    spec = TableSpec(
        name="table_S3x",
        printed=lambda row: row["d_model"] == widest and _is_printed(row),
        columns=[
            Shown("tried on", tried_on, align="l", once=_PLACE),
            Shown("model", text("label"), align="l"),
            Shown("n", text("n")),
            Shown("mean", _loss("ce_mean"), "over rows"),
            *(Shown(header, _loss(f"rows_{name}"), "over rows") for header, name in tails.items()),
            *(Shown(header, _loss(f"tokens_{name}"), "over tokens") for header, name in tails.items()),
            Shown("p99.9", _beside("excess_p99_9"), beside),
            Shown("max", _beside("excess_max"), beside),
            Shown("blown up", BLOWN, beside),
            Shown("not finite", text("rows_nonfinite")),
            Shown("row", text("worst_row"), "worst row"),
            Shown("it reads", text("worst_text"), "worst row", align="l", code=True),
        ],
    )
    return spec.table(
        found,
        caption=(
            f"Loss (nats/token) of every model of d {widest} over rows and over tokens, and above the Baseline's on the"
            f" same row.{of_several_codes(commits_of(rows))} Run {job.run}: {job.caption}"
        ),
        notes=tail_notes(rows),
    )


def table_of_arms(rows: RobustnessRows, job: TrialsJob) -> Table:
    """Table S3 of a stage's arms: a line per kind of input and arm. Raises as `table_s3`."""
    found = [row for row in records(rows, run=job.run) if _is_printed(row)]
    losses = {"median row": "rows_median", "p99.9 row": "rows_p99_9", "worst row": "rows_max"}
    spec = TableSpec(
        name=f"table_{job.name}",
        columns=[
            Shown("tried on", tried_on, align="l", once=_PLACE),
            Shown("arm", text("label"), align="l"),
            Shown("rows", text("rows"), once=_PLACE),
            Shown("n", text("n")),
            Shown("mean", _loss("ce_mean")),
            Shown("× Baseline", RATIO),
            *(Shown(header, _loss(name)) for header, name in losses.items()),
            Shown("blown up", BLOWN),
            Shown("not finite", text("rows_nonfinite")),
        ],
    )
    return spec.table(
        found,
        caption=(
            f"Arms of stage {job.stage} on odd inputs, beyond the paper, beside the arm {job.models[BASELINE]}: does"
            f" one without norms blow up where that does not?{of_several_codes(commits_of(rows))} Run {job.run}:"
            f" {job.caption}"
        ),
        notes=arm_notes(rows, found, job),
    )


def _is_printed(row: Row) -> bool:
    """All but what the text after repeats is compared with; that is held-out text."""
    return row["part"] != PLAIN


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _PLACE)


def _loss(name: str) -> Cell:
    return number(name, digits, lost=NOT_FINITE)


def _beside(name: str) -> Cell:
    """How far above the Baseline; not of the Baseline itself."""
    return lambda row: ABSENT if row["model"] == BASELINE else _loss(name)(row)


def digits(value: float) -> str:
    """A loss in as many decimals as tell something."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _factor(value: float) -> str:
    if value >= 1e4:
        return f"{value:.0e}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


RATIO = interval("ratio", _factor, pairs="n_pairs", lost=NOT_FINITE)
BLOWN = share("blown", of=lambda row: row["rows"] * row["n_pairs"])
