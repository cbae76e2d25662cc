"""Runs of `tapernorm taper`: from their folders to the rows of their tables and figures.

runs.json describes each run, scores.csv has its losses by text, and spread.csv the scales at every norm.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tapernorm.util.atomic_files import write_json
from tapernorm.util.errors import UserError

from ..engine.frame import Frame, Row, integer, number, records, text
from ..read_json import SCHEMA_VERSION, read_document, read_of_run, value_at
from . import token_scales as spread_rows

KIND = "own_rows"
FOLDER = "rows"  # inside the results of the run
BASE = "base model"
_JOB = ("steps", "batch", "context", "lr", "aux_weight", "taper", "seed")
_PROVENANCE = ("commit", "config_hash", "device", "host", "written_at", "packages")
SCORES = Frame(
    file="scores.csv",
    key=("text", "model"),
    verb="rows tapers",
    quoted=True,
    fields={
        "text": text(),
        "model": text(),
        "norms_gone": integer(),
        "norms": integer(),
        "bits_per_byte": number(),
        **{f"row_{key}": number(unit="nats/token") for key in ("mean", "median", "trimmed_mean", "p99_9", "max")},
        "row_nonfinite": integer(),
        **{f"token_{key}": number(unit="nats/token") for key in ("median", "p99_9")},
    },
)


@dataclass(frozen=True)
class OwnRows:
    """The rows of runs of `tapernorm taper` that are shown together."""

    run: str  # common name
    caption: str
    runs: Mapping[str, Row]  # label -> base model, tapered norms, settings, time, provenance
    scores: list[Row]  # a row per text and model, each base model once
    spread: pd.DataFrame  # label, and the columns of `spread_rows.read`

    def spread_of(self, label: str) -> pd.DataFrame:
        """Return the scales at every norm of one run."""
        mine = pd.DataFrame(self.spread[self.spread["label"] == label])
        return mine.drop(columns="label").reset_index(drop=True)


def collect(folders: Mapping[str, Path], *, run: str, caption: str) -> OwnRows:
    """Read the run folders of finished tapers, by label.

    Raises:
        UserError: a folder holds no finished taper, or its scores or scales are of other weights.
    """
    spreads = {label: spread_rows.read(folder / "spread.json") for label, folder in folders.items()}
    return OwnRows(
        run=run,
        caption=caption,
        runs={label: _facts(folder / "result.json") for label, folder in folders.items()},
        scores=list(_scores(folders, spreads)),
        spread=pd.concat([frame.assign(label=label) for label, frame in spreads.items()], ignore_index=True),
    )


def _facts(path: Path) -> Row:
    result = read_document(path, "finetune")
    base, job, told = (value_at(result, key, path) for key in ("base", "job", "provenance"))
    return {
        "base": {"name": Path(base["source"]).name, "digest": base["digest"], "data": base["data"]},
        "norms": list(value_at(result, "norms", path)),
        **{key: job[key] for key in _JOB},
        "level_weight": job.get("level_weight", 0.0),
        "precision": job["train"]["precision"],
        "train_time_s": value_at(result, "values.train_time_s", path),
        "provenance": {key: told.get(key) for key in _PROVENANCE},
    }


def _scores(folders: Mapping[str, Path], spreads: Mapping[str, pd.DataFrame]) -> Iterator[Row]:
    seen: list[tuple[str, Row]] = []
    for label, folder in folders.items():
        scores = read_of_run(folder, "scores.json", "scores")
        gone = len(value_at(read_document(folder / "result.json", "finetune"), "norms", folder))
        norms = len(set(spreads[label]["place"]))
        for corpus, forms in value_at(scores, "corpora", folder).items():
            for form, model, count in (("before", BASE, 0), ("after", label, gone)):
                numbers = _numbers(forms[form])
                if form == "before" and (corpus, numbers) in seen:
                    continue
                seen.append((corpus, numbers))
                yield {"text": corpus, "model": model, "norms_gone": count, "norms": norms, **numbers}


def _numbers(statistics: Mapping[str, Any]) -> Row:
    rows, tokens = statistics["rows"], statistics["tokens"]
    return {
        "bits_per_byte": statistics["bits_per_byte"],
        **{f"row_{key}": rows[key] for key in ("mean", "median", "trimmed_mean", "p99_9", "max", "nonfinite")},
        **{f"token_{key}": tokens[key] for key in ("median", "p99_9")},
    }


def write(rows: OwnRows, folder: Path) -> None:
    """Write runs.json, scores.csv and spread.csv."""
    told = {"schema_version": SCHEMA_VERSION, "kind": KIND, "run": rows.run, "caption": rows.caption}
    write_json(folder / "runs.json", told | {"runs": dict(rows.runs)})
    SCORES.write(SCORES.typed(rows.scores), folder / SCORES.file)
    spread_rows.FRAME.write(rows.spread, folder / spread_rows.FRAME.file)


def read(folder: Path) -> OwnRows:
    """Read the files that `write` wrote.

    Raises:
        UserError: a file is missing, or has another schema.
    """
    if not (folder / "runs.json").is_file():
        raise UserError(f"{folder / 'runs.json'} does not exist: write it with `tapernorm rows tapers`")
    told = read_document(folder / "runs.json", KIND)
    return OwnRows(
        run=told["run"],
        caption=told["caption"],
        runs=told["runs"],
        scores=records(SCORES.read(folder / SCORES.file)),
        spread=spread_rows.FRAME.read(folder / spread_rows.FRAME.file),
    )
