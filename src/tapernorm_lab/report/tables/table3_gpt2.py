"""Table 3: mean cross-entropy of sizes, methods and corpora, and the gap to Vanilla. Table 3x: what a mean hides."""

from collections.abc import Iterator, Sequence

from ...config import published
from ...config.gpt2 import METHOD_LABELS, ORIGINAL
from ...config.jobs import ReportJob
from ..engine.cells import NOT_FINITE, interval, mean_sd, number, shown, text
from ..engine.frame import Row
from ..engine.table_spec import Shown, TableSpec
from ..frames.gpt2 import Gpt2Rows
from ..frames.gpt2_summary import of_form, published_gap, table3_rows
from ..provenance import of_several_codes
from ..table import ABSENT, Table
from .table3_notes import (
    codes,
    stand_ins,
    table3_notes,
    table3x_notes,
)


def table3(found: Gpt2Rows, job: ReportJob) -> Table:
    """Table 3 of a run, from its rows.

    Raises:
        UserError: no score, evaluations of a corpus that scored other rows, or fine-tunes of one size that differ in
            steps, learning rate or batch.
    """
    scores, rows = found.scores, table3_rows(found.scores, run=job.run)
    corpora = {row["corpus"]: row for row in rows}
    beside = any(row["size"] in published.TABLE3 for row in rows)
    counts: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        counts.setdefault((row["size"], row["method"]), set()).add(row["n"])
    columns = [
        Shown("size", text("size"), align="l", once=["size"]),
        Shown("method", _method, align="l"),
        Shown("steps", number("steps", ",")),
        Shown("n", lambda row: "/".join(map(str, sorted(counts[row["size"], row["method"]])))),
    ]
    for corpus, row in corpora.items():
        columns += [Shown("CE", CE, row["label"], of=corpus), Shown("gap %", GAP, row["label"], of=corpus)]
        theirs = f"published {published.TABLE3_COLUMNS[row['column']]}"
        columns += [Shown(theirs, published_cell, row["label"], of=corpus)] if beside else []
    return TableSpec("table3", columns, line=("size", "method"), member="corpus").table(
        rows,
        published=[] if beside else list(_foot(rows, list(corpora))),
        caption=(
            f"Mean cross-entropy (nats/token) of GPT-2 fine-tuned by four methods, and gap to Vanilla.{stand_ins(rows)}"
            f"{of_several_codes(codes(of_form(scores, 'gated')))} Run {job.run}: {job.caption}"
        ),
        notes=table3_notes(rows, of_form(scores, "gated")),
    )


def table3x(found: Gpt2Rows, job: ReportJob) -> Table:
    """Table 3x of a run, from its rows: the tails behind each mean. Raises as `table3`."""
    scores, rows = found.scores, table3_rows(found.scores, run=job.run)
    return TABLE3X.table(
        rows,
        caption=(
            "Cross-entropy (nats/token) over rows and over tokens: what a few rows do to the means of Table 3."
            f"{stand_ins(rows)}{of_several_codes(codes(of_form(scores, 'gated')))} Run {job.run}: {job.caption}"
        ),
        notes=table3x_notes(rows),
    )


def _foot(rows: Sequence[Row], corpora: Sequence[str]) -> Iterator[list[str]]:
    """The published rows, where this run has no size of theirs."""
    column_of = {row["corpus"]: row["column"] for row in rows}
    for size, methods in published.TABLE3.items():
        for method, losses in methods.items():
            who = f"{published.TABLE3_SHORT}, {size}" if method == ORIGINAL else ""
            line = [who, METHOD_LABELS[method], ABSENT if losses.steps is None else f"{losses.steps:,}", "1"]
            for corpus in corpora:
                gap = published_gap(size, method, column_of[corpus])
                line += [f"{getattr(losses, column_of[corpus]):.4f}", shown(gap, ".2f")]
            yield line


def _method(row: Row) -> str:
    return METHOD_LABELS[row["method"]]


def published_cell(row: Row) -> str:
    """Their mean, and in parentheses their gap in percent."""
    gap = shown(row["published_gap_percent"], ".2f", lost="")
    return shown(row["published_ce"], ".4f") + (f" ({gap})" if gap else "")


def _folding(row: Row) -> str:
    return shown(row["folded_minus_gated"], ".0e") if row["n_folded"] else ABSENT


CE = mean_sd("ce", ".4f", lost=NOT_FINITE)
GAP = interval("gap_percent", ".2f", ends="gap", pairs="n_pairs")
TABLE3X = TableSpec(
    "table3x",
    columns=[
        Shown("size", text("size"), align="l", once=["size"]),
        Shown("corpus", text("label"), align="l", once=["size", "label"]),
        Shown("method", _method, align="l"),
        Shown("n", text("n")),
        Shown("mean", CE, "over rows"),
        Shown("median", number("rows_median", ".3f"), "over rows"),
        Shown("trimmed", number("rows_trimmed_mean", ".3f"), "over rows"),
        Shown("p99.9", number("rows_p99_9", ".2f"), "over rows"),
        Shown("max", number("rows_max", ".2f"), "over rows"),
        Shown("median", number("tokens_median", ".3f"), "over tokens"),
        Shown("p99.9", number("tokens_p99_9", ".1f"), "over tokens"),
        Shown("bits/byte", number("bits_per_byte", ".3f")),
        Shown("folded − gated", _folding),
        Shown("row", text("worst_row"), "worst row"),
        Shown("it begins", text("worst_text"), "worst row", align="l", code=True),
    ],
    order=("size", "corpus"),  # so that the methods stand beneath one another
)
