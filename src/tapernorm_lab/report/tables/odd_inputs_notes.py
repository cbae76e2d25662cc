"""What Table S3, of a run or of a stage, and Table S3x say in words."""

import math
from collections.abc import Iterator, Sequence

from ...config.odd_inputs import (
    BASELINE,
    HELD_OUT,
    LONGER,
    TIMES,
    TrialsJob,
)
from ..frames.odd_inputs import RobustnessRows, Row
from ..frames.odd_inputs_summary import PLAIN, blown_share, tried_on
from ..provenance import device_and_code, missing_seeds, short_commits


def table_notes(rows: RobustnessRows, found: Sequence[Row], shown: Sequence[str]) -> Iterator[str]:
    """Notes under Table S3; `found` are the records of all models, `shown` the names of those printed."""
    yield (
        "loss: mean over rows and seeds of the cross-entropy, nats/token, tapered models folded; worst row: the"
        f" largest mean loss of a row, of all seeds. {_guess(rows)}"
    )
    yield from _beside_baseline(rows, found, shown)
    yield from missing_seeds(found, "model", list(dict.fromkeys(row["model"] for row in found)))
    yield _code(rows)


def _beside_baseline(rows: RobustnessRows, found: Sequence[Row], shown: Sequence[str]) -> Iterator[str]:
    """What the models `shown` lose and where they blow up, and what they were tried on."""
    yield (
        "× Baseline: ratio of the losses of one seed, geometric mean over paired seeds, in brackets the 95 % t interval"
        " of its logarithm."
    )
    yield _blown_note(found, shown)
    yield from _answer(found, shown)
    yield from _repeat_note(found, shown)
    yield from _origins(rows)


def _guess(rows: RobustnessRows) -> str:
    uniform = math.log(int(rows.trials["vocab_size"].iloc[0]))
    return (
        f"A token that no model expects costs more than the uniform guess's {uniform:.2f}, so the Baseline's loss on"
        " foreign text may, too."
    )


def _blown_note(found: Sequence[Row], shown: Sequence[str]) -> str:
    """What blowing up is, and how often the Baseline does so beside a model that does not."""
    against = sum(row["baseline_blown"] or 0 for row in found if row["model"] in shown and row["part"] != PLAIN)
    of = sum(row["rows"] * row["n_pairs"] for row in found if row["model"] in shown and row["part"] != PLAIN)
    return (
        f"blown up: rows, of all seeds, whose loss is above {TIMES:g} times the Baseline's on the same row and above"
        " that of a uniform guess, or not finite where the Baseline's is. The other way round, of the Baseline beside"
        f" these models: {against:,} of {of:,} rows."
    )


def _answer(found: Sequence[Row], shown: Sequence[str]) -> Iterator[str]:
    """On which kinds of rows each model blows up, at the width where it does most."""
    if not shown:
        return
    told = []
    for model in shown:
        worst: dict[str, Row] = {}
        for row in found:
            if row["model"] == model and row["part"] != PLAIN and row["blown"]:
                name = tried_on(row)
                worst[name] = max(worst.get(name, row), row, key=_share_of)
        ranked = sorted(worst.items(), key=lambda item: _share_of(item[1]), reverse=True)
        kinds = [f"{name} ({blown_share(row)})" for name, row in ranked]
        label = next(row["label"] for row in found if row["model"] == model)
        told.append(f"{label} on {', '.join(kinds) or 'no row'}")
    several = len({row["d_model"] for row in found}) > 1
    where = ", in parentheses at the width where it is most" if several else ""
    yield f"Blown up{where}: {'; '.join(told)}."


def _share_of(row: Row) -> float:
    return row["blown"] / (row["rows"] * row["n_pairs"])


def _repeat_note(found: Sequence[Row], shown: Sequence[str]) -> Iterator[str]:
    """How much the repeats add to the loss of the text that follows them, at the largest width."""
    widest = max(row["d_model"] for row in found)
    told: dict[str, list[str]] = {}
    for row in found:
        if row["d_model"] == widest and row["model"] in (BASELINE, *shown) and not math.isnan(row["added"]):
            told.setdefault(row["trial_label"], []).append(f"{row['label']} {_added(row)}")
    if told:
        trials = [f"{trial}: {', '.join(models)}" for trial, models in told.items()]
        yield f"What repeats add to the loss of the same text behind them, at d {widest}, nats: {'; '.join(trials)}."


def _added(row: Row) -> str:
    interval = f" [{row['added_low']:.2f}, {row['added_high']:.2f}]" if row["n"] > 1 else ""
    return f"{row['added']:.2f}{interval}".replace("-", "−")


def _origins(rows: RobustnessRows) -> Iterator[str]:
    """Where the rows of each trial are from."""
    seen: set[str] = set()
    for trial in rows.trials.to_dict("records"):
        if trial["trial"] not in (HELD_OUT, LONGER) and trial["trial"] not in seen:
            yield f"{trial['label']}: {trial['origin']}."
        seen.add(trial["trial"])
    trial = rows.trials.iloc[0]
    yield (
        f"Rows have {trial['context']} tokens, as in training, those of positions from {trial['context']} on more;"
        " every model reads the same ones."
    )


def tail_notes(rows: RobustnessRows) -> Iterator[str]:
    """Notes under Table S3x."""
    yield (
        "Over rows: of each row's mean loss; over tokens: of each target's. Medians and p99.9 are averaged over n"
        " seeds, maxima and counts are of all; of fewer than 1,000 rows, p99.9 lies between the two worst. The CSV"
        " holds every width."
    )
    yield (
        "Over Baseline, same row: how far a row's loss lies above that of the Baseline of its seed; blown up: as in"
        " Table S3. Not finite: rows. The worst row is that of the seed whose worst row is worst, its text that of the"
        " positions scored."
    )
    yield _code(rows)


def arm_notes(rows: RobustnessRows, found: Sequence[Row], job: TrialsJob) -> Iterator[str]:
    """Notes under Table S3 of a stage's arms."""
    arms = [name for name in dict.fromkeys(row["model"] for row in found) if name != BASELINE]
    yield (
        "mean: over rows and seeds of the cross-entropy, nats/token, at g = 0 where tapered; median and p99.9: of rows,"
        " averaged over n seeds (of fewer than 1,000 rows, p99.9 lies between the two worst); worst row: of all seeds."
        f" {_guess(rows)}"
    )
    yield from _beside_baseline(rows, found, arms)
    yield from _diverged(found, job)
    yield _code(rows)


def _diverged(found: Sequence[Row], job: TrialsJob) -> Iterator[str]:
    """Which runs of a stage left no model to try."""
    scored = {(row["model"], int(seed)) for row in found for seed in row["seeds"].split()}
    for name, label in job.models.items():
        if lost := [str(seed) for _, seed in job.cells if (name, seed) not in scored]:
            yield f"{label} diverged at seed {', '.join(lost)} and has no score there: see Table {job.stage}."


def _code(rows: RobustnessRows) -> str:
    return device_and_code(rows.scores.to_dict("records"))


def commits_of(rows: RobustnessRows) -> list[str]:
    """Short commits of the code that scored."""
    return short_commits(rows.scores.to_dict("records"))
