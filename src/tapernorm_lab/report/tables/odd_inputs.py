"""Table S3: losses of finished models, or of a stage's arms, on odd inputs, compared with their Baseline.

Table S3x has the tails of every model.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ...config.odd_inputs import BASELINE, HELD_OUT, LONGER, TIMES, OddInputsReportJob
from ..engine.cells import NOT_FINITE, Cell, in_sentences, interval, number, share, text, where
from ..engine.frame import Row
from ..engine.table_spec import Shown, TableSpec
from ..frames.odd_inputs import RobustnessRows
from ..frames.odd_inputs_summary import PLAIN, records, tried_on
from ..table import Table

_PLACE = ("d_model", "trial", "part")
SHOWN = ("internal_aux", "all_aux")  # printed models, as in Table 1; the CSV and Table S3x have all models
_RATIO_NOTE = (
    "× Baseline: ratio of the losses of one seed, geometric mean over paired seeds. In brackets: the 95 % t interval of"
    " its logarithm."
)
_BLOWN_NOTE = (
    f"blown up: rows, of all seeds, whose loss is above {TIMES:g} times the Baseline's on the same row. It must also be"
    " above that of a uniform guess. A loss that is not finite where the Baseline's is counts too."
)
_TAILS = "Medians and p99.9 are averaged over n seeds. Of fewer than 1,000 rows, p99.9 lies between the two worst."


def table_s3(rows: RobustnessRows, job: OddInputsReportJob) -> Table:
    """Return Table S3 of a run: a line per width and kind of input.

    Raises:
        UserError: there are no scores.
    """
    found = records(rows, run=job.run)
    labels = {row["model"]: row["label"] for row in found}
    shown = [model for model in SHOWN if model in labels] or [model for model in labels if model != BASELINE]
    counts = {place: sorted({row["n"] for row in found if _place(row) == place}) for place in map(_place, found)}
    spec = TableSpec(
        "table_S3",
        "Finished models on odd inputs, beyond the paper: does one without norms blow up where its Baseline does not?"
        " The models are those of the run's own tables, and not arms of the study.",
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
                Shown(header, cell, labels[model], of=model, note=note)
                for model in shown
                for header, cell, note in (
                    ("× Baseline", RATIO, _RATIO_NOTE),
                    ("worst row", _loss("rows_max"), ""),
                    ("blown up", BLOWN, _BLOWN_NOTE),
                )
            ),
        ],
        notes=[
            "loss: mean over rows and n seeds of the cross-entropy, nats/token, tapered models folded. worst row: the"
            " largest mean loss of a row, of all seeds."
        ],
    )
    return spec.table(found, job, notes=_notes(rows, found, shown), runs=rows.scores.to_dict("records"))


def table_s3x(rows: RobustnessRows, job: OddInputsReportJob) -> Table:
    """Return Table S3x of a run: a line per kind of input and model, at the largest width. Raises as `table_s3`."""
    found = records(rows, run=job.run)
    widest = max(row["d_model"] for row in found)
    tails = {"median": "median", "p99.9": "p99_9", "max": "max"}
    beside = "over Baseline, same row"
    spec = TableSpec(
        "table_S3x",
        f"Loss (nats/token) of every model of d {widest} over rows and over tokens, and above the Baseline's on the"
        " same row.",
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
        notes=[
            f"Over rows: of each row's mean loss. Over tokens: of each target's. {_TAILS} Maxima and counts are of all"
            " seeds. The CSV holds every width.",
            "Over Baseline, same row: how far a row's loss lies above that of the Baseline of its seed. Blown up: as in"
            " Table S3. Not finite: number of rows. The worst row has the largest loss over all seeds. Its text is that"
            " of the scored positions.",
        ],
    )
    return spec.table(found, job, runs=rows.scores.to_dict("records"))


def table_of_arms(rows: RobustnessRows, job: OddInputsReportJob) -> Table:
    """Return Table S3 of a stage's arms: a line per kind of input and arm. Raises as `table_s3`."""
    found = [row for row in records(rows, run=job.run) if _is_printed(row)]
    losses = {"median row": "rows_median", "p99.9 row": "rows_p99_9", "worst row": "rows_max"}
    spec = TableSpec(
        f"table_{job.name}",
        f"Arms of stage {job.stage} on odd inputs, beyond the paper, beside the arm {job.models[BASELINE]}: does one"
        " without norms blow up where that does not?",
        columns=[
            Shown("tried on", tried_on, align="l", once=_PLACE),
            Shown("arm", text("label"), align="l"),
            Shown("rows", text("rows"), once=_PLACE),
            Shown("n", text("n")),
            Shown("mean", _loss("ce_mean")),
            Shown("× Baseline", RATIO, note=_RATIO_NOTE),
            *(Shown(header, _loss(name)) for header, name in losses.items()),
            Shown("blown up", BLOWN, note=_BLOWN_NOTE),
            Shown("not finite", text("rows_nonfinite")),
        ],
        notes=[
            "mean: over rows and n seeds of the cross-entropy, nats/token, at g = 0 where tapered. Median, p99.9 and"
            f" worst row: of the rows' mean losses. {_TAILS} The worst row is of all seeds."
        ],
    )
    arms = [name for name in dict.fromkeys(row["model"] for row in found) if name != BASELINE]
    notes = [*_notes(rows, found, arms), *_diverged(found, job)]
    return spec.table(found, job, notes=notes, runs=rows.scores.to_dict("records"))


def _is_printed(row: Row) -> bool:
    """Whether a record is printed. The text that texts after repeats are compared with is not."""
    return row["part"] != PLAIN


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _PLACE)


def _loss(name: str) -> Cell:
    return number(name, digits, lost=NOT_FINITE)


def _beside(name: str) -> Cell:
    """Show the excess over the Baseline, and `ABSENT` for the Baseline itself."""
    return where(lambda row: row["model"] != BASELINE, _loss(name))


def digits(value: float) -> str:
    """Format a loss with fewer decimals the larger it is."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _factor(value: float) -> str:
    if value >= 1e4:
        return f"{value:.0e}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


RATIO = interval("ratio", _factor, pairs="n_pairs", lost=NOT_FINITE)
BLOWN = share("blown", of=lambda row: row["rows"] * row["n_pairs"])
_ADDED = interval("added", ".2f")


def _notes(rows: RobustnessRows, found: Sequence[Row], shown: Sequence[str]) -> Iterator[str]:
    """Yield the notes: blow-ups of the Baseline, the loss that repeats add, and the origin of the rows."""
    beside = [row for row in found if row["model"] in shown and _is_printed(row)]
    against, of = sum(row["baseline_blown"] or 0 for row in beside), sum(row["rows"] * row["n_pairs"] for row in beside)
    uniform = math.log(int(rows.trials["vocab_size"].iloc[0]))
    yield (
        f"Conversely, the Baseline blows up relative to these models on {against:,} of {of:,} rows. A uniform guess has"
        f" the loss {uniform:.2f}. A token that a model does not expect has a larger one, in the Baseline too."
    )
    widest = max(row["d_model"] for row in found)
    added: dict[str, list[str]] = {}
    for row in found:
        if row["d_model"] == widest and row["model"] in (BASELINE, *shown) and not math.isnan(row["added"]):
            added.setdefault(row["trial_label"], []).append(f"{row['label']}: {_ADDED(row).strip()}.")
    for trial, models in added.items():
        yield f"{trial}, d {widest}: loss in nats/token that repeats add to the text after them. {' '.join(models)}"
    for trial in rows.trials.drop_duplicates("trial").to_dict("records"):
        if trial["trial"] not in (HELD_OUT, LONGER) and isinstance(trial["origin"], str):  # some rows lack an origin
            yield f"{trial['label']}: {in_sentences(trial['origin'])}"
    context = rows.trials["context"].iloc[0]
    yield f"Rows have {context} tokens, as in training. Positions from {context} on are of longer rows."


def _diverged(found: Sequence[Row], job: OddInputsReportJob) -> Iterator[str]:
    """Yield a note for each arm with diverged runs, which have no score."""
    scored = {(row["model"], int(seed)) for row in found for seed in row["seeds"].split()}
    for name, label in job.models.items():
        if lost := [str(seed) for _, seed in job.cells if (name, seed) not in scored]:
            yield f"{label} diverged at seed {', '.join(lost)} and has no score there: see Table {job.stage}."
