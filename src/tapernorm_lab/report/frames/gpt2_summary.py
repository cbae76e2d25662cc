"""The numbers of Tables 3 and 3x, each derived once: means over seeds, gaps to Vanilla, tails, published numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from tapernorm.util.errors import UserError

from ...config import published
from ..engine import statistics as stats
from ..engine.frame import Row
from ..engine.summary import Against, Cell, refuse_unlike, summarise
from ..provenance import short_commits

VANILLA, THEIRS = "vanilla", "published_"  # THEIRS: prefix of a method whose published weights were evaluated
_AVERAGED = ("rows_median", "rows_trimmed_mean", "rows_p99_9", "tokens_median", "tokens_p99_9", "bits_per_byte")
# Columns that must agree within a corpus, and within the fine-tunes of a size, for losses to be comparable.
_SAME_CORPUS = ("label", "column", "rows", "targets", "tokenizer_sha256", "blocks_sha256")
_SAME_SIZE = ("steps", "lr", "batch", "data_hash")


def table3_rows(scores: pd.DataFrame, *, run: str) -> list[Row]:
    """Return one row per size, method and corpus: statistics over seeds, and the effect of folding.

    Raises:
        UserError: there is no score, a corpus matches no published column, or losses are not comparable.
    """
    gated = of_form(scores, "gated")
    if not gated:
        raise UserError(f"run {run} has no scores: run `tapernorm evaluate` on its models first")
    _require_columns(gated)
    fused = {_key(row): row for row in of_form(scores, "fused")}
    refuse_unlike(gated, "corpus", _SAME_CORPUS)
    refuse_unlike([row for row in gated if row["kind"] == "finetuned"], "size", _SAME_SIZE)
    cells = summarise(gated, ("size", "method", "corpus"), "rows_mean", {"gap": Against(_reference)})
    return [
        {"run": run, **cell.key}
        | _losses_of(cell)
        | _tails_of(cell, fused)
        | _published_beside(cell.key["size"], cell.key["method"], cell.rows[0]["column"])
        for cell in cells
    ]


def of_form(scores: pd.DataFrame, form: str) -> list[Row]:
    return [row for row in scores.to_dict("records") if row["form"] == form]


def _key(row: Row) -> tuple[Any, ...]:
    seed = -1 if pd.isna(row["seed"]) else row["seed"]
    return row["size"], row["method"], seed, row["corpus"]


def _require_columns(rows: Sequence[Row]) -> None:
    """Raise UserError for a corpus that matches no published column. One scored without the workflow may not."""
    known = ", ".join(published.TABLE3_COLUMNS)
    for row in rows:
        if row["column"] not in published.TABLE3_COLUMNS:
            raise UserError(
                f"corpus {row['corpus']} is for {row['column']!r}, and the published columns are {known}: score it"
                f" under the name of one of them (--blocks {next(iter(published.TABLE3_COLUMNS))}=DIR)"
            )


def _reference(cell: Row) -> Row:
    """Return the reference of a gap: Vanilla, or the published Vanilla for published weights."""
    return {"method": THEIRS + VANILLA if cell["method"].startswith(THEIRS) else VANILLA}


def _losses_of(cell: Cell) -> Row:
    """Return mean, spread and gap of one method, size and corpus."""
    first = cell.rows[0]
    shared = ("label", "column", "kind", "parameters", "steps", "rows", "targets", "context", "vocab_size", "origin")
    return {key: None if pd.isna(first[key]) else first[key] for key in shared} | {
        "n": cell.n,
        "seeds": cell.seeds if first["kind"] == "finetuned" else "",
        "ce_mean": cell.mean,
        "ce_std": cell.sd,
        "n_pairs": len(cell.gaps["gap"].seeds),
        **cell.gap("gap", value="gap_percent"),
        "commits": " ".join(short_commits(cell.rows)),
    }


def _tails_of(cell: Cell, fused: Mapping[Any, Row]) -> Row:
    """Return the tails: quantiles averaged over seeds, and the worst row of all seeds."""
    worst = cell.worst("worst_ce")
    moved = [fused[_key(row)]["rows_mean"] - row["rows_mean"] for row in cell.rows if _key(row) in fused]
    return {name: cell.average(name) for name in _AVERAGED} | {
        "rows_max": worst["worst_ce"],
        "nonfinite": cell.total("rows_nonfinite"),
        "n_folded": len(moved),
        "folded_minus_gated": max(moved, key=abs)
        if moved
        else stats.NAN,  # of the mean, for the seed that it moved most
        "worst_row": worst["worst_row"],
        "worst_text": worst["worst_text"],
    }


def _published_beside(size: str, method: str, column: str) -> Row:
    """Return the published mean and gap of this size and method; NaN if there is none."""
    theirs = published.TABLE3.get(size, {})
    mine = theirs.get(method.removeprefix(THEIRS))
    if mine is None:
        return {"published_ce": stats.NAN, "published_gap_percent": stats.NAN, "published_source": ""}
    return {
        "published_ce": getattr(mine, column),
        "published_gap_percent": published_gap(size, method.removeprefix(THEIRS), column),
        "published_source": published.TABLE3_SOURCE,
    }


def published_gap(size: str, method: str, column: str) -> float:
    mine, vanilla = (getattr(published.TABLE3[size][name], column) for name in (method, VANILLA))
    return stats.NAN if method == VANILLA else 100 * (mine - vanilla) / vanilla
