"""The numbers of Table S3, each derived once: means over seeds, and the excess over the Baseline."""

from typing import Any

from tapernorm.util.errors import UserError

from ...config.odd_inputs import BASELINE, HELD_OUT, LONGER
from ..engine.frame import Row
from ..engine.summary import Against, Cell, summarise
from ..provenance import short_commits
from .odd_inputs import RobustnessRows

WHOLE, PLAIN, AFTER = "all", "unrepeated", "after"  # parts of trials
_AVERAGED = ("rows_median", "rows_p99_9", "tokens_median", "tokens_p99_9", "excess_p99_9")
_LARGEST = ("rows_max", "tokens_max", "excess_max")
_COUNTED = ("rows_nonfinite", "tokens_nonfinite", "blown", "baseline_blown")
_BASELINE: dict[str, Any] = {"model": BASELINE}
_PAIRS = {
    "ratio": Against(lambda _: _BASELINE, "ratio"),
    "excess": Against(lambda _: _BASELINE, "difference"),
    # The loss of a text after repeats, less that of the same model on the same text without them.
    "added": Against(lambda key: {"trial": HELD_OUT, "part": PLAIN} if key["part"] == AFTER else None, "difference"),
}


def records(rows: RobustnessRows, *, run: str) -> list[Row]:
    """Return one record per width, trial, part and model, in the order of the trials, the Baseline first.

    Columns:
        ce_mean, ce_std: over n seeds.
        ratio, excess: of the losses to the Baseline's, paired by seed, with 95 % t intervals. The ratio is a geometric
            mean, because some losses are many times larger; the excess is in nats.
        added: loss that repeats add to the same text after them, with its interval.
        quantiles are averaged over seeds; maxima, counts and the worst row are of all seeds.

    Raises:
        UserError: there are no scores.
    """
    if rows.scores.empty:
        raise UserError(f"run {run} has no scores on odd inputs: run `tapernorm evaluate --models` first")
    trials: list[Row] = rows.trials.to_dict("records")
    order = {(trial["trial"], trial["part"]): place for place, trial in enumerate(trials)}
    cells = summarise(rows.scores, ("d_model", "trial", "part", "model"), "rows_mean", _PAIRS)
    cells.sort(key=lambda cell: (cell.key["d_model"], order[cell.key["trial"], cell.key["part"]]))
    return [_record(cell, trials[order[cell.key["trial"], cell.key["part"]]]) for cell in cells]


def _record(cell: Cell, trial: Row) -> Row:
    first, worst = cell.rows[0], cell.worst("rows_max")
    return {
        "run": first["run"],
        "d_model": first["d_model"],
        "parameters": first["parameters"],
        "trial": trial["trial"],
        "trial_label": trial["label"],
        "part": trial["part"],
        "part_label": trial["part_label"],
        "rows": trial["rows"],
        "model": first["model"],
        "label": first["label"],
        "n": cell.n,
        "seeds": cell.seeds,
        "ce_mean": cell.mean,
        "ce_std": cell.sd,
        "n_pairs": len(cell.gaps["ratio"].seeds),
        **cell.gap("ratio"),
        **cell.gap("excess"),
        **cell.gap("added"),
        **{name: cell.average(name) for name in _AVERAGED},
        **{name: cell.largest(name) for name in _LARGEST},
        **{name: cell.total(name) for name in _COUNTED},
        "worst_seed": worst["seed"],
        "worst_row": worst["worst_row"],
        "worst_text": worst["worst_text"],
        "commits": " ".join(short_commits(cell.rows)),
    }


def tried_on(row: Row) -> str:
    """Name the rows of a record."""
    if row["part"] == WHOLE:
        return row["trial_label"]
    return row["part_label"] if row["trial"] == LONGER else f"{row['trial_label']}: {row['part_label']}"
