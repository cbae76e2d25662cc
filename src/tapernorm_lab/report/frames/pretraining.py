"""JSON of training jobs -> two tidy frames: one row per job, and one row per job and logged step."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from tapernorm.util.atomic_files import whole_file
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest

from ..read_json import (
    parse_json,
    read_csv,
    read_document,
    text_of,
    value_at,
)

JOB = ["variant", "d_model", "seed"]  # what tells one job of a run from another

# Column of the results frame -> where result.json holds it. A `values` entry is {"value": ..., "unit": ...}.
_COLUMNS = {
    "variant": "job.variant",
    "d_model": "job.model.d_model",
    "seed": "job.seed",
    "steps": "job.steps",
    "valid_ce": "values.valid_ce",  # nats/token
    "bits_per_byte": "values.bits_per_byte",
    "valid_tokens": "values.valid_tokens",
    "parameters": "values.parameters",
    "train_tokens": "values.train_tokens",
    "train_time_s": "values.train_time_s",
    "tokens_per_s": "values.tokens_per_s",
    "peak_mem_bytes": "values.peak_mem_bytes",
    "scale_target": "scale_target",  # null for the Baseline
    "radial_share": "radial.share",  # mean over tokens of |<grad_h CE, h>| / (|grad_h CE| |h|), h the pre-logit stream
    "n_layer": "job.model.n_layer",
    "n_head": "job.model.n_head",
    "d_ff": "job.model.d_ff",
    "vocab_size": "job.model.vocab_size",
    "norm": "job.model.norm",
    "context": "job.model.context",
    "batch": "job.train.batch",
    "lr": "job.train.lr",
    "precision": "job.train.precision",
    "device": "provenance.device",
    "config_hash": "provenance.config_hash",
    "commit": "provenance.commit",  # null outside git
    "torch": "provenance.packages.torch",
}
# What `tapernorm fold` adds to the row of the job that it folded; absent for a model that was not.
_FOLD_COLUMNS = {
    "valid_ce_gated": "values.valid_ce_gated",  # nats/token, in the same pass as the two below
    "valid_ce_unfused": "values.valid_ce_unfused",
    "valid_ce_fused": "values.valid_ce_fused",
    "fold_logit_difference": "reports.fused.largest_logit_difference",
}
_KINDS = {"pretrain": _COLUMNS, "fold": {**{key: _COLUMNS[key] for key in JOB}, **_FOLD_COLUMNS}}
_TEXT: dict[Any, Any] = dict.fromkeys(
    ("run", "variant", "norm", "precision", "device", "config_hash", "commit", "torch", "settings_hash", "taper_hash"),
    "str",
)
_TIMES = {"step", "elapsed_s"}  # keys that a training and an evaluation line of one step both have


def collect(paths: Iterable[Path], *, run: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read each `result.json`: of training, with the `metrics.jsonl` beside it, and of folding.

    Returns:
        Results (one row per training job) and curves (one row per job and logged step), sorted by job.

    Raises:
        UserError: a file is missing, damaged or of another schema, two files hold the same job, or a fold comes
            without the training that it belongs to.
    """
    rows: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {kind: {} for kind in _KINDS}
    origin: dict[tuple[Any, ...], Path] = {}
    for path in map(Path, paths):
        kind, row = read_result(path)
        job = tuple(row[key] for key in JOB)
        if job in rows[kind]:
            named = ", ".join(f"{key} {value}" for key, value in zip(JOB, job, strict=True))
            raise UserError(f"{path} and {origin[kind, *job]} both hold {named}: give one result file per job")
        rows[kind][job], origin[kind, *job] = row, path
    trained, folded = rows["pretrain"], rows["fold"]
    if not trained:
        raise UserError("no result.json was given: name at least one, such as results/RUN/pretrain/*/*/*/result.json")
    for job in folded.keys() - trained.keys():
        raise UserError(f"{origin['fold', *job]} folds a model whose training result is not given: give both")
    absent = dict.fromkeys(_FOLD_COLUMNS, float("nan"))
    ordered = [{"run": run, **absent, **trained[job], **folded.get(job, {})} for job in sorted(trained)]
    curves = [
        {**dict(zip(JOB, job, strict=True)), **line}
        for job in sorted(trained)
        for line in read_metrics(origin["pretrain", *job].parent / "metrics.jsonl")
    ]
    return _typed(pd.DataFrame(ordered)), _typed(pd.DataFrame(curves).sort_values([*JOB, "step"], ignore_index=True))


def read_result(path: Path) -> tuple[str, dict[str, Any]]:
    """Kind and columns of one result file."""
    document = read_document(path, *_KINDS)
    kind = document["kind"]
    row = {column: value_at(document, place, path) for column, place in _KINDS[kind].items()}
    return kind, row | (_config_versions(document["job"]) if kind == "pretrain" else {})


def _config_versions(job: dict[str, Any]) -> dict[str, str | None]:
    """Digests of the settings that all jobs of one config share, and of those that all its tapered jobs do."""
    model = {key: value for key, value in job["model"].items() if key not in ("d_model", "d_ff")}
    taper = job["taper"] and {key: value for key, value in job["taper"].items() if key != "anchor_weight"}
    return {
        "settings_hash": digest({"model": model, "train": job["train"]}),
        "taper_hash": digest(taper) if taper else None,
    }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One dictionary per step, in which the training and the evaluation line of the step are one."""
    steps: dict[int, dict[str, Any]] = {}
    for number, text in enumerate(text_of(path).splitlines(), start=1):
        line = parse_json(path, text, f" line {number}")
        if not isinstance(line, dict) or "step" not in line:
            raise UserError(f"{path} line {number} holds no step: the file is damaged; run the job again")
        known = steps.setdefault(line["step"], {})
        if twice := known.keys() & line.keys() - _TIMES:
            raise UserError(f"{path} line {number}: step {line['step']} logs {', '.join(sorted(twice))} a second time")
        known.update({key: value for key, value in line.items() if key not in known})
    if not steps:
        raise UserError(f"{path} is empty: the job that writes it has not finished; run it again")
    return list(steps.values())


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Text columns as text and a column of nulls as numbers, as `read` gives them back."""
    empty = frame.columns.difference(frame.dropna(axis="columns", how="all").columns)
    kinds = dict.fromkeys(empty, "float64") | {column: kind for column, kind in _TEXT.items() if column in frame}
    return frame.astype(kinds)


def write(results: pd.DataFrame, curves: pd.DataFrame, folder: Path) -> None:
    """Write results.csv and curves.csv, each float in the shortest form that reads back as the same bits."""
    for name, frame in (("results", results), ("curves", curves)):
        with whole_file(folder / f"{name}.csv") as temporary:
            frame.to_csv(temporary, index=False, lineterminator="\n")


def read(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read back what `write` wrote."""
    return _read_csv(folder / "results.csv"), _read_csv(folder / "curves.csv")


def _read_csv(path: Path) -> pd.DataFrame:
    return read_csv(path, ["run", *JOB] if path.name == "results.csv" else JOB, text=_TEXT, verb="rows")
