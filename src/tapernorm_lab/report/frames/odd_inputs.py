"""Scores on odd inputs -> three tidy frames: scores, trials and losses by position; and these back from CSV."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tapernorm.util.atomic_files import whole_file
from tapernorm.util.errors import UserError

from ...config.odd_inputs import TrialsJob
from ..read_json import read_csv, read_document, value_at
from .gpt2 import printable

KIND = "robustness"
CELL = ["d_model", "seed"]  # models of one cell read the same rows and are compared with one Baseline
TAILS = ("mean", "median", "p99_9", "max", "nonfinite")
BESIDE = ("excess_p99_9", "excess_max", "excess_row", "blown", "baseline_blown")
_ENDINGS = {"scores": "", "trials": "_trials", "positions": "_positions"}  # frame -> what its file's name ends with
_PROVENANCE = ("device", "config_hash", "commit")
_TEXT = (
    *("run", "model", "label", "trial", "part", "part_label", "worst_text", "origin", "rows_sha256", "weights_sha256"),
    *(*_PROVENANCE, "torch"),
)
_INTEGERS = (
    *(*CELL, "parameters", "rows_nonfinite", "tokens_nonfinite", "excess_row", "blown", "baseline_blown", "worst_row"),
    *("first", "last", "rows", "context", "vocab_size"),
)
_TYPES: dict[str, str] = dict.fromkeys(_TEXT, "str") | dict.fromkeys(_INTEGERS, "Int64")

Row = dict[str, Any]


@dataclass(frozen=True)
class RobustnessRows:
    """What is known of a run's models on odd inputs."""

    scores: pd.DataFrame  # one row per width, seed, model, trial and part
    trials: pd.DataFrame  # one row per trial and part: the same for all models
    positions: pd.DataFrame  # one row per width, seed, model and bin of positions


def collect(paths: Iterable[Path], *, run: str) -> RobustnessRows:
    """Read the files that `tapernorm evaluate --models` wrote, one per width and seed, or one per seed of a stage.

    Raises:
        UserError: no file, or one is missing, damaged or of another schema, two are of one width and seed, or they
            scored other rows.
    """
    documents = {Path(path): read_document(Path(path), KIND) for path in paths}
    if not documents:
        raise UserError(
            "no scores were given: name at least one file, such as results/RUN/robustness/d*/*.json, or of a stage"
            " results/RUN/robustness/study/STAGE/*.json"
        )
    cells: dict[tuple[int, int], Path] = {}
    for path, document in documents.items():
        cell = (value_at(document, "job.d_model", path), value_at(document, "job.seed", path))
        if cell in cells:
            raise UserError(f"{path} and {cells[cell]} are both of d_model {cell[0]}, seed {cell[1]}: give one of them")
        cells[cell] = path
    ordered = [(cells[cell], documents[cells[cell]]) for cell in sorted(cells)]
    first_path, first = ordered[0]
    trials = list(_trial_rows(first, first_path))
    for path, document in ordered[1:]:
        if list(_trial_rows(document, path)) != trials:
            raise UserError(
                f"{path} and {first_path} scored other rows, so their losses are not comparable: run the older again"
            )
    return RobustnessRows(
        scores=_typed([{"run": run, **row} for path, document in ordered for row in _score_rows(document, path)]),
        trials=_typed([{"run": run, **row} for row in trials]),
        positions=_typed([{"run": run, **row} for path, document in ordered for row in _position_rows(document, path)]),
    )


def require(rows: RobustnessRows, job: TrialsJob) -> None:
    """Refuse rows of other models than the job's.

    Raises:
        UserError: a width and seed is missing or too many, or a model is none of the job's.
    """
    scores = rows.scores
    found = set(zip(scores["d_model"].tolist(), scores["seed"].tolist(), strict=True))
    if wrong := sorted(found.symmetric_difference(job.cells)):
        cells = ", ".join(f"d {d_model} seed {seed}" for d_model, seed in wrong)
        raise UserError(
            f"table {job.name} of this config and these scores are not of the same widths and seeds, see {cells}: run"
            " `tapernorm evaluate --models` for the config's"
        )
    if others := sorted(set(scores["model"]) - job.models.keys()):
        raise UserError(f"table {job.name} of this config is not about {', '.join(others)}, which these scores are of")


def write(rows: RobustnessRows, folder: Path, *, name: str = "S3") -> None:
    """Write one CSV per frame, each float in the shortest form that reads back as the same bits.

    Args:
        name: of the table that they are for.
    """
    for frame, path in files(folder, name).items():
        with whole_file(path) as temporary:
            getattr(rows, frame).to_csv(temporary, index=False, lineterminator="\n")


def read(folder: Path, *, run: str, name: str = "S3") -> RobustnessRows:
    """Read back what `write` wrote of this run.

    Raises:
        UserError: a file is missing, or holds rows of another run.
    """
    paths = files(folder, name)
    frames = {frame: _read_csv(path) for frame, path in paths.items()}
    for frame, found in frames.items():
        if others := set(found["run"]) - {run}:
            raise UserError(f"{paths[frame]} is of run {', '.join(others)} and the config is of run {run!r}")
    return RobustnessRows(**frames)


def files(folder: Path, name: str) -> dict[str, Path]:
    return {frame: folder / f"study_{name}{ending}.csv" for frame, ending in _ENDINGS.items()}


def _score_rows(document: Row, path: Path) -> Iterator[Row]:
    models: dict[str, Row] = value_at(document, "models", path)
    facts = {name: value_at(document, f"provenance.{name}", path) for name in _PROVENANCE}
    facts["torch"] = value_at(document, "provenance.packages.torch", path)
    for score in value_at(document, "scores", path):
        model = models[score["model"]]
        worst = score["worst"][0]
        yield {
            **_cell(document),
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
                "context": value_at(document, "job.context", path),
                "vocab_size": value_at(document, "vocab_size", path),
                "origin": trial["origin"],
                "rows_sha256": trial["rows_sha256"],
            }


def _position_rows(document: Row, path: Path) -> Iterator[Row]:
    width = value_at(document, "job.robustness.position_bin", path)
    models: Mapping[str, Row] = value_at(document, "models", path)
    for name, losses in value_at(document, "positions", path).items():
        for index, loss in enumerate(losses):
            where = {"first": index * width, "last": (index + 1) * width}
            yield {**_cell(document), "model": name, "label": models[name]["label"], **where, "ce": loss}


def _cell(document: Row) -> Row:
    return {key: document["job"][key] for key in CELL}


def _typed(rows: list[Row] | pd.DataFrame) -> pd.DataFrame:
    """Text as text, counts as integers that may be missing, all else as numbers: as `read` gives them back."""
    frame = pd.DataFrame(rows)
    return frame.astype({column: _TYPES.get(column, "float64") for column in frame.columns})


def _read_csv(path: Path) -> pd.DataFrame:
    return read_csv(path, ["run"], text=_TEXT, verb=f"rows {path.stem}", typed=_typed)
