"""What Table S3 prints of scores on odd inputs, each number derived once: seeds averaged, excess over the Baseline."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapernorm.util.errors import UserError

from ...config.odd_inputs import BASELINE, HELD_OUT, LONGER
from .. import statistics as stats
from ..table import ABSENT
from ..tables.table1_pretraining import short_commits
from .odd_inputs import RobustnessRows, Row

WHOLE, PLAIN, AFTER = "all", "unrepeated", "after"  # parts of trials
_AVERAGED = ("rows_median", "rows_p99_9", "tokens_median", "tokens_p99_9", "excess_p99_9")
_LARGEST = ("rows_max", "tokens_max", "excess_max")
_COUNTED = ("rows_nonfinite", "tokens_nonfinite", "blown", "baseline_blown")

Place = tuple[int, str, str]  # d_model, trial, part


@dataclass(frozen=True)
class Difference:
    """Mean over seeds of a difference, with its 95 % t interval; NaN where n is too small."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Difference":
        mean, std = stats.mean_std(values)
        n = len(values)
        half = stats.t_quantile(n - 1) * std / math.sqrt(n) if n > 1 else stats.NAN
        return cls(mean, mean - half, mean + half, n)

    @classmethod
    def paired(cls, losses: Mapping[int, float], others: Mapping[int, float]) -> "Difference":
        """Of losses and others' (seed -> loss each), over the seeds that both have."""
        return cls.of([losses[seed] - others[seed] for seed in sorted(losses.keys() & others.keys())])

    def exp(self) -> "Difference":
        """Of logs: the geometric mean of the ratios."""
        return Difference(math.exp(self.value), math.exp(self.low), math.exp(self.high), self.n)


def records(rows: RobustnessRows, *, run: str) -> list[Row]:
    """One record per width, trial, part and model, in the order of the trials; the Baseline first.

    Columns: ce_mean and ce_std over n seeds; paired by seed with the Baseline, and with 95 % t intervals, the ratio of
    the losses (its geometric mean: some are many times larger) and their excess in nats; added: of a part that follows
    repeats, the loss that they added to the same text, likewise; quantiles averaged over seeds, maxima over all, counts
    summed over all; the worst row of all seeds.

    Raises:
        UserError: there are no scores.
    """
    scores: list[Row] = rows.scores.to_dict("records")
    if not scores:
        raise UserError(f"run {run} has no scores on odd inputs: run `tapernorm evaluate --models` first")
    cells: dict[Place, dict[str, dict[int, Row]]] = {}
    for row in scores:
        place = (row["d_model"], row["trial"], row["part"])
        cells.setdefault(place, {}).setdefault(row["model"], {})[row["seed"]] = row
    trials: list[Row] = rows.trials.to_dict("records")
    return [
        _record(cells, (d_model, trial["trial"], trial["part"]), model, trial)
        for d_model in sorted({row["d_model"] for row in scores})
        for trial in trials
        for model in cells.get((d_model, trial["trial"], trial["part"]), {})
    ]


def _record(cells: Mapping[Place, Mapping[str, Mapping[int, Row]]], place: Place, model: str, trial: Row) -> Row:
    by_seed, baseline = cells[place][model], cells[place].get(BASELINE, {})
    first = next(iter(by_seed.values()))
    losses = _losses(by_seed)
    mean, std = stats.mean_std(list(losses.values()))
    others = {} if model == BASELINE else _losses(baseline)
    ratio = Difference.paired(_logs(losses), _logs(others)).exp()
    return {
        "run": first["run"],
        "d_model": place[0],
        "parameters": first["parameters"],
        "trial": place[1],
        "trial_label": trial["label"],
        "part": place[2],
        "part_label": trial["part_label"],
        "rows": trial["rows"],
        "model": model,
        "label": first["label"],
        "n": len(by_seed),
        "seeds": " ".join(map(str, sorted(by_seed))),
        "ce_mean": mean,
        "ce_std": std,
        "n_pairs": ratio.n,
        **_spread("ratio", ratio),
        **_spread("excess", Difference.paired(losses, others)),
        **_spread("added", _added(cells, place, model)),
        **{name: stats.mean_std([row[name] for row in by_seed.values()])[0] for name in _AVERAGED},
        **{name: _largest(row[name] for row in by_seed.values()) for name in _LARGEST},
        **{name: _total(row[name] for row in by_seed.values()) for name in _COUNTED},
        **_worst(by_seed),
        "commits": " ".join(short_commits(by_seed.values())),
    }


def _added(cells: Mapping[Place, Mapping[str, Mapping[int, Row]]], place: Place, model: str) -> Difference:
    """What repeats added to the loss of the text behind them: the model's own, with and without them."""
    d_model, _, part = place
    plain = cells.get((d_model, HELD_OUT, PLAIN), {}).get(model, {})
    return Difference.paired(_losses(cells[place][model]), _losses(plain) if part == AFTER else {})


def _losses(by_seed: Mapping[int, Row]) -> dict[int, float]:
    return {seed: row["rows_mean"] for seed, row in by_seed.items()}


def _logs(losses: Mapping[int, float]) -> dict[int, float]:
    return {seed: math.log(loss) for seed, loss in losses.items()}


def _spread(name: str, found: Difference) -> Row:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _largest(values: Iterable[float]) -> float:
    """The largest of all; NaN, which stands for what is not finite, where one is."""
    known = list(values)
    return stats.NAN if any(math.isnan(value) for value in known) else max(known)


def _total(counts: Iterable[Any]) -> int | None:
    """The sum; None where there is nothing to count, as of the Baseline against itself."""
    known = list(counts)
    return None if any(isinstance(count, float) or not isinstance(count, int) for count in known) else sum(known)


def _worst(by_seed: Mapping[int, Row]) -> Row:
    """The worst row of all seeds; one that is not finite counts as worst."""
    worst = max(by_seed.values(), key=lambda row: math.inf if math.isnan(row["rows_max"]) else row["rows_max"])
    return {"worst_seed": worst["seed"], "worst_row": worst["worst_row"], "worst_text": worst["worst_text"]}


def tried_on(row: Row) -> str:
    """What the rows of a record are, in words."""
    if row["part"] == WHOLE:
        return row["trial_label"]
    return row["part_label"] if row["trial"] == LONGER else f"{row['trial_label']}: {row['part_label']}"


def blown_share(row: Row) -> str:
    """How many of a record's rows blow up, as a percentage."""
    return share(row["blown"], row["rows"] * row["n_pairs"])


def share(count: int | None, of: int) -> str:
    """How many rows of all, as a percentage; a nought is certain, and no share that is not is printed as one."""
    if count is None:
        return ABSENT
    if count in (0, of):
        return f"{100 * (count == of)} %"
    return f"{min(max(100 * count / of, 0.1), 99.9):.1f} %"
