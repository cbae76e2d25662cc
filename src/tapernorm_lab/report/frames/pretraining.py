"""Pre-trainings: from the JSON of jobs to two frames, one row per job, and one row per job and logged step."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest

from ..engine.frame import PROVENANCE, Frame, integer, number, text
from ..provenance import linear_kernel
from ..read_json import each_once, parse_json, text_of

JOB = ["variant", "d_model", "seed"]  # columns that identify a job of a run

RESULTS = Frame(
    file="results.csv",
    key=("run", *JOB),
    verb="rows training",
    fields={
        "run": text(),
        # From `tapernorm fold`; missing for a model that was not folded.
        "valid_ce_gated": number(
            "values.valid_ce_gated", "nats/token", of="fold"
        ),  # measured together with the two below
        "valid_ce_unfused": number("values.valid_ce_unfused", "nats/token", of="fold"),
        "valid_ce_fused": number("values.valid_ce_fused", "nats/token", of="fold"),
        "fold_logit_difference": number("reports.fused.largest_logit_difference", of="fold"),
        "variant": text("job.variant"),
        "d_model": integer("job.model.d_model"),
        "seed": integer("job.seed"),
        "steps": integer("job.steps"),
        "valid_ce": number("values.valid_ce", "nats/token"),
        "bits_per_byte": number("values.bits_per_byte"),
        "valid_tokens": integer("values.valid_tokens"),
        "parameters": integer("values.parameters"),
        "train_tokens": integer("values.train_tokens"),
        "train_time_s": number("values.train_time_s", "s"),
        "tokens_per_s": number("values.tokens_per_s", "1/s"),
        "peak_mem_bytes": integer("values.peak_mem_bytes", "bytes"),
        "scale_target": number("scale_target"),  # null for the Baseline
        # Mean over tokens of |<grad_h CE, h>| / (|grad_h CE| |h|), h the pre-logit stream.
        "radial_share": number("radial.share"),
        "n_layer": integer("job.model.n_layer"),
        "n_head": integer("job.model.n_head"),
        "d_ff": integer("job.model.d_ff"),
        "vocab_size": integer("job.model.vocab_size"),
        "norm": text("job.model.norm"),
        "context": integer("job.model.context", "tokens"),
        "batch": integer("job.train.batch", "rows"),
        "lr": number("job.train.lr"),
        "precision": text("job.train.precision"),
        **PROVENANCE,
        "linear": text(),
        "settings_hash": text(),
        "taper_hash": text(),
    },
)
CURVES = Frame(
    file="curves.csv",
    key=JOB,
    verb="rows training",
    fields={"variant": text(), "d_model": integer(), "seed": integer(), "step": integer()},
)
FRAMES = {"results": RESULTS, "curves": CURVES}
Results = dict[tuple[Any, ...], tuple[Path, dict[str, Any]]]  # of each job, its file and what it holds
_KINDS = ("pretrain", "fold")
_TIMES = {"step", "elapsed_s"}  # keys of both the training line and the evaluation line of a step


def collect(paths: Iterable[Path], *, run: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read each `result.json`: those of trainings, with the `metrics.jsonl` beside them, and those of folds.

    Returns:
        Results (one row per training job) and curves (one row per job and logged step), sorted by job.

    Raises:
        UserError: a file is missing, damaged or of another schema, two files are of the same job, or the training of a
            fold is not given.
    """
    trained, folded = trained_and_folded(paths)
    rows, curves = [], []
    for job, (path, document) in sorted(trained.items(), key=lambda item: item[0]):
        fold = RESULTS.absent("fold")
        if job in folded:
            folded_path, folded_document = folded[job]
            fold = RESULTS.facts(folded_document, folded_path, of="fold")
        facts = {**RESULTS.facts(document, path), "linear": linear_kernel(document)}
        rows.append({"run": run, **fold, **facts, **_config_versions(document["job"])})
        named = dict(zip(JOB, job, strict=True))
        curves += [{**named, **line} for line in read_metrics(path.parent / "metrics.jsonl")]
    return RESULTS.typed(rows), CURVES.typed(curves).sort_values([*JOB, "step"], ignore_index=True)


def trained_and_folded(paths: Iterable[Path]) -> tuple[Results, Results]:
    """Each `result.json` of training, and each of folding, with what it holds, by the `JOB` that it is of.

    Raises:
        UserError: as `collect`.
    """
    found = each_once(paths, _KINDS, {"kind": "kind"} | {key: RESULTS.fields[key].place for key in JOB})
    trained, folded = ({job[1:]: one for job, one in found.items() if job[0] == kind} for kind in _KINDS)
    if not trained:
        raise UserError(
            "no RESULT of a training is given: give at least one, such as results/RUN/pretrain/*/*/*/result.json"
        )
    for job in folded.keys() - trained.keys():
        raise UserError(
            f"{folded[job][0]} folds a model whose training result is missing: add that result.json to RESULT"
        )
    return trained, folded


def _config_versions(job: dict[str, Any]) -> dict[str, str | None]:
    """Return the digest of the settings that all jobs of a config share, and of those that its tapered jobs share."""
    model = {key: value for key, value in job["model"].items() if key not in ("d_model", "d_ff")}
    taper = job["taper"] and {key: value for key, value in job["taper"].items() if key != "anchor_weight"}
    return {
        "settings_hash": digest({"model": model, "train": job["train"]}),
        "taper_hash": digest(taper) if taper else None,
    }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl into one dictionary per step, which joins the training line and the evaluation line.

    Raises:
        UserError: the file is missing, empty or damaged.
    """
    steps: dict[int, dict[str, Any]] = {}
    for at, one in enumerate(text_of(path).splitlines(), start=1):
        line = parse_json(path, one, f" line {at}")
        if not isinstance(line, dict) or "step" not in line:
            raise UserError(f"{path} line {at} is damaged, as it holds no step: run the job again")
        known = steps.setdefault(line["step"], {})
        if twice := known.keys() & line.keys() - _TIMES:
            raise UserError(
                f"{path} line {at}: step {line['step']} logs {', '.join(sorted(twice))} twice: run the job again"
            )
        known.update({key: value for key, value in line.items() if key not in known})
    if not steps:
        raise UserError(f"{path} is empty: run the job that writes it again")
    return list(steps.values())


def write(results: pd.DataFrame, curves: pd.DataFrame, folder: Path) -> None:
    """Write results.csv and curves.csv."""
    RESULTS.write(results, folder / RESULTS.file)
    CURVES.write(curves, folder / CURVES.file)


def read(folder: Path, *, run: str | None = None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read results.csv and curves.csv. Raises as `Frame.read`."""
    return RESULTS.read(folder / RESULTS.file, run=run), CURVES.read(folder / CURVES.file)
