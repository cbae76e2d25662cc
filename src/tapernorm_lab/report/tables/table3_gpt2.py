"""Table 3: mean cross-entropy of sizes, methods and corpora, and the gap to Vanilla. Table 3x: what a mean hides."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import pandas as pd

from ...config import published
from ...config.gpt2 import METHOD_LABELS, ORIGINAL
from ..frames.gpt2 import Row
from ..frames.gpt2_summary import of_form, published_gap, table3_rows
from ..table import ABSENT, Column, Table
from .table1_pretraining import of_several_codes
from .table3_notes import (
    codes,
    stand_ins,
    table3_notes,
    table3x_notes,
)


def table3(scores: pd.DataFrame, *, run: str, caption: str) -> Table:
    """Table 3 of a run, from the scores frame.

    Raises:
        UserError: no score, evaluations of a corpus that scored other rows, or fine-tunes of one size that differ in
            steps, learning rate or batch.
    """
    rows = table3_rows(scores, run=run)
    corpora = list(dict.fromkeys(row["corpus"] for row in rows))
    beside = any(row["size"] in published.TABLE3 for row in rows)
    columns = [Column("size", align="l"), Column("method", align="l"), Column("steps"), Column("n")]
    for corpus in corpora:
        first = next(row for row in rows if row["corpus"] == corpus)
        columns += [Column("CE", first["label"]), Column("gap %", first["label"])]
        columns += [Column(f"published {published.TABLE3_COLUMNS[first['column']]}", first["label"])] if beside else []
    return Table(
        name="table3",
        columns=columns,
        rows=list(_table3_lines(rows, corpora, beside)),
        published=[] if beside else list(_foot(rows, corpora)),
        caption=(
            f"Mean cross-entropy (nats/token) of GPT-2 fine-tuned by four methods, and gap to Vanilla.{stand_ins(rows)}"
            f"{of_several_codes(codes(of_form(scores, 'gated')))} Run {run}: {caption}"
        ),
        notes=list(table3_notes(rows, of_form(scores, "gated"))),
        records=rows,
    )


def table3x(scores: pd.DataFrame, *, run: str, caption: str) -> Table:
    """Table 3x of a run, from the scores frame: the tails behind each mean. Raises as `table3`."""
    rows = table3_rows(scores, run=run)
    return Table(
        name="table3x",
        columns=[
            *(Column(header, align="l") for header in ("size", "corpus", "method")),
            Column("n"),
            *(Column(header, "over rows") for header in ("mean", "median", "trimmed", "p99.9", "max")),
            *(Column(header, "over tokens") for header in ("median", "p99.9")),
            Column("bits/byte"),
            Column("folded − gated"),
            Column("row", "worst row"),
            Column("it begins", "worst row", align="l", code=True),
        ],
        rows=list(_table3x_lines(rows)),
        published=[],
        caption=(
            "Cross-entropy (nats/token) over rows and over tokens: what a few rows do to the means of Table 3."
            f"{stand_ins(rows)}{of_several_codes(codes(of_form(scores, 'gated')))} Run {run}: {caption}"
        ),
        notes=list(table3x_notes(rows)),
        records=rows,
    )


def _table3_lines(rows: Sequence[Row], corpora: Sequence[str], beside: bool) -> Iterator[list[str]]:
    """One line per size and method."""
    previous = None
    for (size, method), group in groupby(rows, key=lambda row: (row["size"], row["method"])):
        cells = {row["corpus"]: row for row in group}
        first = next(iter(cells.values()))
        counts = sorted({row["n"] for row in cells.values()})
        steps = ABSENT if first["steps"] is None else f"{first['steps']:,}"
        line = ["" if size == previous else size, METHOD_LABELS[method], steps, "/".join(map(str, counts))]
        previous = size
        for cell in (cells.get(corpus) for corpus in corpora):
            line += [ce_cell(cell), gap_cell(cell)]
            line += [published_cell(cell)] if beside else []
        yield line


def _foot(rows: Sequence[Row], corpora: Sequence[str]) -> Iterator[list[str]]:
    """The published rows, where this run has no size of theirs."""
    column_of = {row["corpus"]: row["column"] for row in rows}
    for size, methods in published.TABLE3.items():
        for method, losses in methods.items():
            who = f"{published.TABLE3_SHORT}, {size}" if method == ORIGINAL else ""
            line = [who, METHOD_LABELS[method], ABSENT if losses.steps is None else f"{losses.steps:,}", "1"]
            for corpus in corpora:
                gap = published_gap(size, method, column_of[corpus])
                line += [f"{getattr(losses, column_of[corpus]):.4f}", _signed(gap, ".2f")]
            yield line


def _table3x_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """One line per size, corpus and method, so that the methods stand beneath one another."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    corpora = list(dict.fromkeys(row["corpus"] for row in rows))
    last = ("", "")
    for row in sorted(rows, key=lambda row: (sizes.index(row["size"]), corpora.index(row["corpus"]))):
        place = (row["size"], row["label"])
        heading = ["" if place[0] == last[0] else place[0], "" if place == last else place[1]]
        last = place
        yield [
            *(*heading, METHOD_LABELS[row["method"]], str(row["n"])),
            *(ce_cell(row), _number(row["rows_median"], 3), _number(row["rows_trimmed_mean"], 3)),
            *(_number(row["rows_p99_9"], 2), _number(row["rows_max"], 2)),
            *(_number(row["tokens_median"], 3), _number(row["tokens_p99_9"], 1), _number(row["bits_per_byte"], 3)),
            _signed(row["folded_minus_gated"], ".0e") if row["n_folded"] else ABSENT,
            *(str(row["worst_row"]), row["worst_text"]),
        ]


def ce_cell(row: Row | None) -> str:
    """Mean ± sample standard deviation; the mean alone for one seed; in words where a row has no finite loss."""
    if row is None:
        return ABSENT
    if math.isnan(row["ce_mean"]):
        return "not finite"
    return f"{row['ce_mean']:.4f}" + (f" ± {row['ce_std']:.4f}" if row["n"] > 1 else "")


def gap_cell(row: Row | None) -> str:
    """Gap and its 95 % interval; the gap alone for one pair."""
    if row is None or not row["n_pairs"] or math.isnan(row["gap_percent"]):
        return ABSENT
    interval = f" [{row['gap_low']:.2f}, {row['gap_high']:.2f}]" if row["n_pairs"] > 1 else ""
    return f"{row['gap_percent']:.2f}{interval}".replace("-", "−")


def published_cell(row: Row | None) -> str:
    """Their mean, and in parentheses their gap in percent."""
    if row is None or math.isnan(row["published_ce"]):
        return ABSENT
    gap = row["published_gap_percent"]
    return f"{row['published_ce']:.4f}" + ("" if math.isnan(gap) else f" ({_signed(gap, '.2f')})")


def _number(value: float, decimals: int) -> str:
    return ABSENT if math.isnan(value) else f"{value:.{decimals}f}"


def _signed(value: float, spec: str) -> str:
    return ABSENT if math.isnan(value) else f"{value:{spec}}".replace("-", "−")
