"""What tapers of models of one's own came to: their scores beside the base model's, and norm by norm the scales."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..names import of_blocks
from . import spread_rows
from .documents import read_document, read_of_run, value_at
from .table import ABSENT, Column, Table

_NOT_FINITE = "not finite"
BASE = "base model"


def scores_table(runs: Mapping[str, Path], *, name: str, caption: str) -> Table:
    """A line for each base model and run, text by text, from the run folders of finished tapers, by label.

    Raises:
        UserError: a folder holds no finished taper, or its scores or scales are of an earlier one.
    """
    records = list(_score_records(runs))
    ways = ("mean", "median", "trimmed", "p99.9", "worst")
    return Table(
        name="scores",
        columns=[
            *(Column(header, align="l") for header in ("text", "model")),
            Column("norms gone"),
            Column("bits/byte"),
            *(Column(header, "over rows") for header in ways),
            *(Column(header, "over tokens") for header in ("median", "p99.9")),
        ],
        rows=[_score_cells(record) for record in records],
        published=[],
        caption=f"Cross-entropy (nats/token) before and after training, norm-free parts folded. Run {name}: {caption}",
        notes=[
            "trimmed: without the 2.5 % of rows at either end; worst: the largest mean loss of a row.",
            *(_run_note(label, run) for label, run in runs.items()),
        ],
        records=records,
    )


def _score_records(runs: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    seen: list[tuple[str, dict[str, Any]]] = []
    for label, run in runs.items():
        result, scores = _result(run), read_of_run(run, "scores.json", "scores")
        gone, norms = len(value_at(result, "norms", run)), spread_rows.read(run / "spread.json")["place"].nunique()
        for text, forms in value_at(scores, "corpora", run).items():
            for form, model, count in (("before", BASE, 0), ("after", label, gone)):
                numbers = _numbers(forms[form])
                if form == "before" and (text, numbers) in seen:
                    continue
                seen.append((text, numbers))
                yield {"text": text, "model": model, "norms_gone": count, "norms": norms, **numbers}


def _numbers(statistics: Mapping[str, Any]) -> dict[str, Any]:
    rows, tokens = statistics["rows"], statistics["tokens"]
    return {
        "bits_per_byte": statistics["bits_per_byte"],
        **{f"row_{key}": rows[key] for key in ("mean", "median", "trimmed_mean", "p99_9", "max", "nonfinite")},
        **{f"token_{key}": tokens[key] for key in ("median", "p99_9")},
    }


def _score_cells(record: Mapping[str, Any]) -> list[str]:
    keys = ("row_mean", "row_median", "row_trimmed_mean", "row_p99_9", "row_max", "token_median", "token_p99_9")
    return [
        record["text"],
        record["model"],
        f"{record['norms_gone']} of {record['norms']}",
        _loss(record["bits_per_byte"], 4),
        *(_loss(record[key], 4 if key == "row_mean" else 2) for key in keys),
    ]


def _loss(value: float | None, digits: int) -> str:
    if value is None:
        return _NOT_FINITE
    return f"{value:.{digits}f}" if value < 1e4 else f"{value:.2g}"


def norms_table(label: str, run: Path, *, name: str, caption: str) -> Table:
    """A line for each norm of one run: what became of it, and the scales of its input before and after.

    Raises:
        UserError: the folder holds no finished taper, or its scales were not measured.
    """
    rows = spread_rows.read(run / "spread.json")
    records = rows.drop(columns=["rows", "context", "text"]).to_dict("records")
    first = rows.iloc[0]
    headers = ("median", "p99.9", "largest", "its token", "position 0")
    pairs = zip(records[::2], records[1::2], strict=True)
    return Table(
        name=f"norms_{label}",
        columns=[
            Column("norm", align="l", code=True),
            Column("becomes", align="l"),
            Column("1/c"),
            *(
                Column(header, form, align="l" if header == "its token" else "r", code=header == "its token")
                for form in spread_rows.FORMS
                for header in headers
            ),
        ],
        rows=[_norm_cells(before, after) for before, after in pairs],
        published=[],
        caption=(
            f"Per-token scale at every norm of the run {label}, before and after: its median at positions after "
            f"the first, and multiples of that. Run {name}: {caption}"
        ),
        notes=[
            f"{first['rows']} held-out rows of {first['context']} tokens; {first['text']}. 1/c: the scale that stands"
            " for every token's where the norm is gone. position 0: median over rows.",
            _run_note(label, run),
        ],
        records=records,
    )


def _norm_cells(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> list[str]:
    gone = before["gone"]
    cells = [before["norm"], "linear" if gone else "kept", f"{before['constant']:.3g}" if gone else ABSENT]
    for form in (before, after):
        cells += [
            _scale(form["median"]),
            *(_times(form[key] / form["median"]) for key in ("p99_9", "largest")),
            repr(form["piece"]),
            _times(form["first"] / form["median"]),
        ]
    return cells


def _scale(value: float) -> str:
    return _NOT_FINITE if pd.isna(value) else f"{value:.3g}"


def _times(value: float) -> str:
    return _NOT_FINITE if pd.isna(value) else f"{value:.3g}×"


def _result(run: Path) -> dict[str, Any]:
    return read_document(run / "result.json", "finetune")


def _run_note(label: str, run: Path) -> str:
    """Where a run's numbers come from."""
    result = _result(run)
    base, job, told = (value_at(result, key, run) for key in ("base", "job", "provenance"))
    packages = told["packages"]
    minutes = value_at(result, "values.train_time_s", run) / 60
    settings, gone = ", ".join(_settings(job)), ", ".join(of_blocks(value_at(result, "norms", run))) or "no norm"
    return (
        f"{label}: base {Path(base['source']).name} (digest {base['digest']}); gone {gone}; {base['data']}; {settings};"
        f" {minutes:.1f} min of training on {told['device']}; code {told['commit']}, PyTorch {packages['torch']},"
        f" transformers {packages['transformers']}."
    )


def _settings(job: Mapping[str, Any]) -> Sequence[str]:
    window = job["taper"]
    return [
        f"{job['steps']} steps of {job['batch']} rows of {job['context']} tokens",
        f"peak learning rate {job['lr']:g}",
        f"scale loss {job['aux_weight']:g}",
        *([f"level loss {job['level_weight']:g}"] if job.get("level_weight") else []),
        f"gate {window['start']}–{window['end']}" if window else "a control",
        f"{job['train']['precision']}",
        f"seed {job['seed']}",
    ]
