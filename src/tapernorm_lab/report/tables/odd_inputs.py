"""Table S3: losses of finished models on odd inputs beside their Baseline's, and the same of a stage's arms.

Table S3x holds the tails of every model.
"""

import math
from collections.abc import Iterator, Sequence

from ...config.odd_inputs import BASELINE, TrialsJob
from ..frames.odd_inputs import RobustnessRows, Row
from ..frames.odd_inputs_summary import (
    PLAIN,
    blown_share,
    records,
    tried_on,
)
from ..table import ABSENT, Column, Table
from .odd_inputs_notes import (
    arm_notes,
    commits_of,
    table_notes,
    tail_notes,
)
from .table1_pretraining import of_several_codes

SHOWN = ("internal_aux", "all_aux")  # in print, as in Table 1; the CSV and Table S3x hold every model


def tables(rows: RobustnessRows, job: TrialsJob) -> list[Table]:
    """All that a job reports: S3 and S3x of a run, or that of a stage's arms. Raises as `table_s3`."""
    if job.stage is not None:
        return [table_of_arms(rows, job)]
    return [make(rows, run=job.run, caption=job.caption) for make in (table_s3, table_s3x)]


def table_s3(rows: RobustnessRows, *, run: str, caption: str) -> Table:
    """Table S3 of a run: a line per width and kind of input.

    Raises:
        UserError: there are no scores.
    """
    found = records(rows, run=run)
    labels = {row["model"]: row["label"] for row in found}
    shown = [model for model in SHOWN if model in labels] or [model for model in labels if model != BASELINE]
    return Table(
        name="table_S3",
        columns=[
            Column("d"),
            Column("tried on", align="l"),
            Column("rows"),
            Column("n"),
            *(Column(header, labels[BASELINE]) for header in ("loss", "worst row")),
            *(Column(header, labels[model]) for model in shown for header in ("× Baseline", "worst row", "blown up")),
        ],
        rows=list(_lines(found, shown)),
        published=[],
        caption=(
            "Finished models on odd inputs, beyond the paper: does one without norms blow up where its Baseline does"
            f" not? The models are those of the run's own tables, tapered as its config's section taper says, and not"
            f" arms of the study.{of_several_codes(commits_of(rows))} Run {run}: {caption}"
        ),
        notes=list(table_notes(rows, found, shown)),
        records=found,
    )


def table_s3x(rows: RobustnessRows, *, run: str, caption: str) -> Table:
    """Table S3x of a run: a line per kind of input and model of the widest. Raises as `table_s3`."""
    found = records(rows, run=run)
    widest = max(row["d_model"] for row in found)
    return Table(
        name="table_S3x",
        columns=[
            *(Column(header, align="l") for header in ("tried on", "model")),
            Column("n"),
            *(Column(header, "over rows") for header in ("mean", "median", "p99.9", "max")),
            *(Column(header, "over tokens") for header in ("median", "p99.9", "max")),
            *(Column(header, "over Baseline, same row") for header in ("p99.9", "max", "blown up")),
            Column("not finite"),
            Column("row", "worst row"),
            Column("it reads", "worst row", align="l", code=True),
        ],
        rows=list(_tails([row for row in found if row["d_model"] == widest and row["part"] != PLAIN])),
        published=[],
        caption=(
            f"Loss (nats/token) of every model of d {widest} over rows and over tokens, and above the Baseline's on the"
            f" same row.{of_several_codes(commits_of(rows))} Run {run}: {caption}"
        ),
        notes=list(tail_notes(rows)),
        records=found,
    )


def table_of_arms(rows: RobustnessRows, job: TrialsJob) -> Table:
    """Table S3 of a stage's arms: a line per kind of input and arm. Raises as `table_s3`."""
    found = [row for row in records(rows, run=job.run) if row["part"] != PLAIN]
    return Table(
        name=f"table_{job.name}",
        columns=[
            *(Column(header, align="l") for header in ("tried on", "arm")),
            Column("rows"),
            Column("n"),
            *(Column(header) for header in ("mean", "× Baseline", "median row", "p99.9 row", "worst row")),
            Column("blown up"),
            Column("not finite"),
        ],
        rows=list(_arm_lines(found)),
        published=[],
        caption=(
            f"Arms of stage {job.stage} on odd inputs, beyond the paper, beside the arm {job.models[BASELINE]}: does"
            f" one without norms blow up where that does not?{of_several_codes(commits_of(rows))} Run {job.run}:"
            f" {job.caption}"
        ),
        notes=list(arm_notes(rows, found, job)),
        records=found,
    )


def number(value: float) -> str:
    """A loss in as many decimals as tell something; in words where it is none."""
    if math.isnan(value):
        return "not finite"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _lines(found: Sequence[Row], shown: Sequence[str]) -> Iterator[list[str]]:
    last = None
    for (d_model, _, part), cells in by_place(found).items():
        if part == PLAIN:
            continue  # what the text after repeats is compared with; it is held-out text
        baseline = cells[BASELINE]
        counts = sorted({row["n"] for row in cells.values()})
        yield [
            "" if d_model == last else str(d_model),
            tried_on(baseline),
            str(baseline["rows"]),
            "/".join(map(str, counts)),
            number(baseline["ce_mean"]),
            number(baseline["rows_max"]),
            *(cell for model in shown for cell in _beside(cells.get(model))),
        ]
        last = d_model


def by_place(found: Sequence[Row]) -> dict[tuple[int, str, str], dict[str, Row]]:
    """(d_model, trial, part) -> model -> its record."""
    places: dict[tuple[int, str, str], dict[str, Row]] = {}
    for row in found:
        places.setdefault((row["d_model"], row["trial"], row["part"]), {})[row["model"]] = row
    return places


def _beside(row: Row | None) -> list[str]:
    if row is None:
        return [ABSENT] * 3
    return [_ratio(row), number(row["rows_max"]), blown_share(row)]


def _ratio(row: Row) -> str:
    """Ratio to the Baseline and its interval; the ratio alone for one pair, in words where there is none."""
    if math.isnan(row["ratio"]):
        return "not finite" if row["n_pairs"] else ABSENT
    interval = f" [{_factor(row['ratio_low'])}, {_factor(row['ratio_high'])}]" if row["n_pairs"] > 1 else ""
    return _factor(row["ratio"]) + interval


def _factor(value: float) -> str:
    if value >= 1e4:
        return f"{value:.0e}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _grouped(found: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """Each record and, where it is the first of its kind of input, what that is."""
    last = ""
    for row in found:
        here = tried_on(row)
        yield "" if here == last else here, row
        last = here


def _tails(found: Sequence[Row]) -> Iterator[list[str]]:
    for kind, row in _grouped(found):
        baseline = row["model"] == BASELINE
        yield [
            kind,
            row["label"],
            str(row["n"]),
            number(row["ce_mean"]),
            *(number(row[f"rows_{name}"]) for name in ("median", "p99_9", "max")),
            *(number(row[f"tokens_{name}"]) for name in ("median", "p99_9", "max")),
            *(ABSENT if baseline else _signed(row[name]) for name in ("excess_p99_9", "excess_max")),
            blown_share(row),
            str(row["rows_nonfinite"]),
            str(row["worst_row"]),
            row["worst_text"],
        ]


def _arm_lines(found: Sequence[Row]) -> Iterator[list[str]]:
    for kind, row in _grouped(found):
        yield [
            kind,
            row["label"],
            str(row["rows"]) if kind else "",
            str(row["n"]),
            number(row["ce_mean"]),
            ABSENT if row["model"] == BASELINE else _ratio(row),
            *(number(row[f"rows_{name}"]) for name in ("median", "p99_9", "max")),
            blown_share(row),
            str(row["rows_nonfinite"]),
        ]


def _signed(value: float) -> str:
    return number(value) if math.isnan(value) or value >= 0 else f"−{number(-value)}"
