"""What tapers of models of one's own came to: their scores beside the base model's, and norm by norm the scales."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from tapernorm.util.module_names import of_blocks

from ..frames import token_scales as spread_rows
from ..frames.own_models import OwnRows
from ..table import ABSENT, Column, Table

_NOT_FINITE = "not finite"


def scores_table(rows: OwnRows, _: str = "") -> Table:
    """A line for each base model and run, text by text."""
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
        rows=[_score_cells(record) for record in rows.scores],
        published=[],
        caption=(
            "Cross-entropy (nats/token) before and after training, norm-free parts folded."
            f" Run {rows.run}: {rows.caption}"
        ),
        notes=[
            "trimmed: without the 2.5 % of rows at either end; worst: the largest mean loss of a row.",
            *(_run_note(label, rows) for label in rows.runs),
        ],
        records=rows.scores,
    )


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


def norms_table(rows: OwnRows, label: str) -> Table:
    """A line for each norm of one run: what became of it, and the scales of its input before and after."""
    spread = rows.spread_of(label)
    records = spread.drop(columns=["rows", "context", "text"]).to_dict("records")
    first = spread.iloc[0]
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
            f"the first, and multiples of that. Run {rows.run}: {rows.caption}"
        ),
        notes=[
            f"{first['rows']} held-out rows of {first['context']} tokens; {first['text']}. 1/c: the scale that stands"
            " for every token's where the norm is gone. position 0: median over rows.",
            _run_note(label, rows),
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


def _run_note(label: str, rows: OwnRows) -> str:
    """Where a run's numbers come from."""
    facts = rows.runs[label]
    base, told = facts["base"], facts["provenance"]
    packages = told["packages"]
    settings, gone = ", ".join(_settings(facts)), ", ".join(of_blocks(facts["norms"])) or "no norm"
    return (
        f"{label}: base {base['name']} (digest {base['digest']}); gone {gone}; {base['data']}; {settings};"
        f" {facts['train_time_s'] / 60:.1f} min of training on {told['device']}; code {told['commit']}, PyTorch"
        f" {packages['torch']}, transformers {packages['transformers']}."
    )


def _settings(facts: Mapping[str, Any]) -> Sequence[str]:
    window = facts["taper"]
    return [
        f"{facts['steps']} steps of {facts['batch']} rows of {facts['context']} tokens",
        f"peak learning rate {facts['lr']:g}",
        f"scale loss {facts['aux_weight']:g}",
        *([f"level loss {facts['level_weight']:g}"] if facts["level_weight"] else []),
        f"gate {window['start']}–{window['end']}" if window else "a control",
        f"{facts['precision']}",
        f"seed {facts['seed']}",
    ]
