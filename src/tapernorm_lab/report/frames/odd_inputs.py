"""Scores on odd inputs: from the JSON to three frames, which are scores, trials and losses by position."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from tapernorm.util.errors import UserError

from ...config.odd_inputs import OddInputsReportJob
from ..engine.frame import PROVENANCE, Frame, Row, integer, number, text
from ..read_json import each_once, value_at
from .gpt2 import printable

KIND = "robustness"
CELL = ["d_model", "seed"]  # the models of a cell score the same rows and share a Baseline
TAILS = ("mean", "median", "p99_9", "max", "nonfinite")
BESIDE = ("excess_p99_9", "excess_max", "excess_row", "blown", "baseline_blown")
TRIALS = Frame(
    file="study_{}_trials.csv",
    key=("run", "trial", "part"),
    verb="rows study_S3",
    fields={
        "run": text(),
        "trial": text(),
        "label": text(),
        "part": text(),
        "part_label": text(),
        "first": integer(unit="position"),
        "last": integer(unit="position"),
        "rows": integer(),
        "context": integer("job.context", "tokens"),
        "vocab_size": integer("vocab_size"),
        "origin": text(),
        "rows_sha256": text(),
    },
)
POSITIONS = Frame(
    file="study_{}_positions.csv",
    key=("run", *CELL, "model", "first"),
    verb="rows study_S3",
    fields={
        "run": text(),
        "d_model": integer("job.d_model"),
        "seed": integer("job.seed"),
        "model": text(),
        "label": text(),
        "first": integer(unit="position"),
        "last": integer(unit="position"),
        "ce": number(unit="nats/token"),
    },
)
SCORES = Frame(
    file="study_{}.csv",
    key=("run", *CELL, "model", "trial", "part"),
    verb="rows study_S3",
    fields={
        "run": text(),
        "d_model": integer("job.d_model"),
        "seed": integer("job.seed"),
        "model": text(),
        "label": text(),
        "parameters": integer(),
        "trial": text(),
        "part": text(),
        **{f"{over}_{name}": number(unit="nats/token") for over in ("rows", "tokens") for name in TAILS},
        "rows_nonfinite": integer(),
        "tokens_nonfinite": integer(),
        **{name: number(unit="nats/token") for name in ("excess_p99_9", "excess_max")},
        **{name: integer() for name in ("excess_row", "blown", "baseline_blown", "worst_row")},
        "worst_text": text(),
        "weights_sha256": text(),
        **PROVENANCE,
    },
)
FRAMES = {"scores": SCORES, "trials": TRIALS, "positions": POSITIONS}


@dataclass(frozen=True)
class RobustnessRows:
    """The rows of a run's models on odd inputs."""

    scores: pd.DataFrame  # one row per width, seed, model, trial and part
    trials: pd.DataFrame  # one row per trial and part, shared by all models
    positions: pd.DataFrame  # one row per width, seed, model and bin of positions


def collect(paths: Iterable[Path], *, run: str) -> RobustnessRows:
    """Read the files that `tapernorm evaluate --models` wrote, one per width and seed, or one per seed of a stage.

    Raises:
        UserError: no file is given; a file is missing, damaged or of another schema; two files have the same width and
            seed; or the files scored different rows.
    """
    files = each_once(paths, [KIND], {key: SCORES.fields[key].place for key in CELL})
    if not files:
        raise UserError(
            "no RESULT is given: give at least one, such as results/RUN/robustness/d*/*.json, or for a stage"
            " results/RUN/robustness/study/STAGE/*.json"
        )
    ordered = [files[cell] for cell in sorted(files)]
    first_path, first = ordered[0]
    trials = list(_trial_rows(first, first_path))
    for path, document in ordered[1:]:
        if list(_trial_rows(document, path)) != trials:
            raise UserError(
                f"{path} and {first_path} scored different rows, so losses are not comparable: run the older again"
            )
    found = {
        "scores": [row for path, document in ordered for row in _score_rows(document, path)],
        "trials": trials,
        "positions": [row for path, document in ordered for row in _position_rows(document, path)],
    }
    return RobustnessRows(
        **{name: FRAMES[name].typed([{"run": run, **row} for row in rows]) for name, rows in found.items()}
    )


def require(rows: RobustnessRows, job: OddInputsReportJob) -> None:
    """Refuse rows of other models than the job's.

    Raises:
        UserError: a width and seed is missing, or is not of the job, or a model is not of the job.
    """
    scores = rows.scores
    found = set(zip(scores["d_model"].tolist(), scores["seed"].tolist(), strict=True))
    if wrong := sorted(found.symmetric_difference(job.cells)):
        cells = ", ".join(f"d {d_model} seed {seed}" for d_model, seed in wrong)
        raise UserError(
            f"the scores of table {job.name} and the config differ in widths and seeds ({cells}): run"
            " `tapernorm evaluate --models` for those of the config"
        )
    if others := sorted(set(scores["model"]) - job.models.keys()):
        raise UserError(
            f"the scores of table {job.name} are of {', '.join(others)}, which the config lacks: leave these out"
        )


def write(rows: RobustnessRows, folder: Path, *, name: str = "S3") -> None:
    """Write one CSV per frame, named by the table `name`."""
    for frame, path in files(folder, name).items():
        FRAMES[frame].write(getattr(rows, frame), path)


def read(folder: Path, *, run: str, name: str = "S3") -> RobustnessRows:
    """Read the CSV files of this run. Raises as `Frame.read`."""
    return RobustnessRows(**{frame: FRAMES[frame].read(path, run=run) for frame, path in files(folder, name).items()})


def files(folder: Path, name: str) -> dict[str, Path]:
    return {key: folder / frame.file.format(name) for key, frame in FRAMES.items()}


def _score_rows(document: Row, path: Path) -> Iterator[Row]:
    models: dict[str, Row] = value_at(document, "models", path)
    facts = SCORES.facts(document, path)
    cell = {key: facts.pop(key) for key in CELL}
    for score in value_at(document, "scores", path):
        model = models[score["model"]]
        worst = score["worst"][0]
        yield {
            **cell,
            "model": score["model"],
            "label": model["label"],
            "parameters": model["parameters"],
            "trial": score["trial"],
            "part": score["part"],
            **{f"{over}_{name}": score[over][name] for over in ("rows", "tokens") for name in TAILS},
            **(score["beside_baseline"] or dict.fromkeys(BESIDE)),
            "worst_row": worst["row"],
            "worst_text": printable(worst["text"]),
            "weights_sha256": model["weights_sha256"][:12],
            **facts,
        }


def _trial_rows(document: Row, path: Path) -> Iterator[Row]:
    trials: dict[str, Row] = value_at(document, "trials", path)
    facts = TRIALS.facts(document, path)
    for name, trial in trials.items():
        for part, where in trial["parts"].items():
            yield {
                "trial": name,
                "label": trial["label"],
                "part": part,
                "part_label": where["label"],
                "first": where["first"],
                "last": where["last"],
                "rows": trial["rows"],
                **facts,
                "origin": trial["origin"],
                "rows_sha256": trial["rows_sha256"],
            }


def _position_rows(document: Row, path: Path) -> Iterator[Row]:
    width = value_at(document, "job.robustness.position_bin", path)
    models: Mapping[str, Row] = value_at(document, "models", path)
    cell = POSITIONS.facts(document, path)
    for name, losses in value_at(document, "positions", path).items():
        for index, loss in enumerate(losses):
            where = {"first": index * width, "last": (index + 1) * width}
            yield {**cell, "model": name, "label": models[name]["label"], **where, "ce": loss}
