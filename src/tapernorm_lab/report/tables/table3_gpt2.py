"""Table 3: mean cross-entropy of sizes, methods and corpora, and the gap to Vanilla. Table 3x: what a mean hides."""

from collections.abc import Iterator, Sequence

from ...config import published
from ...config.gpt2 import METHOD_LABELS, ORIGINAL
from ...config.jobs import ReportJob
from ..engine.cells import NOT_FINITE, in_sentences, interval, mean_sd, number, shown, text, where
from ..engine.frame import Row
from ..engine.table_spec import Shown, TableSpec
from ..frames.gpt2 import Gpt2Rows
from ..frames.gpt2_summary import of_form, published_gap, table3_rows
from ..table import ABSENT, Table

CE = mean_sd("ce", ".4f", lost=NOT_FINITE)
GAP = interval("gap_percent", ".2f", ends="gap", pairs="n_pairs")
_CE_NOTE = (
    "CE: mean over rows of each row's mean over its targets, in float32. It is mean ± sample standard deviation over"
    " n seeds. The models are at the end state (g = 0, or all norms removed). Table 3x has the change by folding."
)
_GAP_NOTE = (
    "gap %: 100 (L − L_Vanilla)/L_Vanilla, mean over paired seeds. In brackets: its 95 % t interval. Original is"
    " compared with the Vanilla of every seed."
)
_KEPT = "Vanilla keeps every LayerNorm, Internal-TaperLN only the final one, All-TaperLN and FakeLN none."


def table3(found: Gpt2Rows, job: ReportJob) -> Table:
    """Return Table 3 of a run, from its rows.

    Raises:
        UserError: there is no score, evaluations of a corpus scored different rows, or fine-tunes of one size differ
            in steps, learning rate or batch.
    """
    rows, scored = table3_rows(found.scores, run=job.run), of_form(found.scores, "gated")
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
        columns.append(Shown("CE", CE, row["label"], of=corpus, note=_CE_NOTE))
        columns.append(Shown("gap %", GAP, row["label"], of=corpus, note=_GAP_NOTE))
        theirs = f"published {published.TABLE3_COLUMNS[row['column']]}"
        columns += [Shown(theirs, published_cell, row["label"], of=corpus)] if beside else []
    place = "Columns published" if beside else f"Rows {published.TABLE3_SHORT}"
    source = (
        f"{place}: from {published.TABLE3_SOURCE}, fine-tuned by them, not measured here, with the gap from it."
        f" {published.TABLE3_REMARK}."
    )
    spec = TableSpec(
        "table3",
        f"Mean cross-entropy (nats/token) of GPT-2 fine-tuned by four methods, and gap to Vanilla.{stand_ins(rows)}",
        columns,
        notes=[_KEPT, source],
        line=("size", "method"),
        member="corpus",
    )
    foot = [] if beside else list(_foot(rows, list(corpora)))
    return spec.table(rows, job, published=foot, notes=[*_shared_notes(rows), *_origin(scored)], runs=_codes(scored))


def table3x(found: Gpt2Rows, job: ReportJob) -> Table:
    """Return Table 3x of a run, from its rows: the tails behind each mean. Raises as `table3`."""
    rows = table3_rows(found.scores, run=job.run)
    spec = TableSpec(
        "table3x",
        "Cross-entropy (nats/token) over rows and over tokens: what a few rows do to the means of Table 3."
        f"{stand_ins(rows)}",
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
            Shown("folded − gated", where(lambda row: row["n_folded"], number("folded_minus_gated", ".0e"))),
            Shown("row", text("worst_row"), "worst row"),
            Shown("it begins", text("worst_text"), "worst row", align="l", code=True),
        ],
        notes=[
            "Over rows: of each row's mean loss, mean ± sample standard deviation over n seeds. trimmed: 2.5 % of the"
            " rows cut at either end. Over tokens: of each target's loss, quantiles to within 0.01 %.",
            "Quantiles are averaged over n seeds. Max and the worst row are those with the largest loss over all seeds."
            " Of fewer than 1,000 rows, p99.9 lies between the two worst.",
            "folded − gated: change of a model's mean by folding all its norms. bits/byte: total bits over the"
            " bytes of the targets' text, comparable across tokenizers.",
            "worst row: its index in the corpus, and its text in ASCII, with other characters escaped.",
            *([_FAKELN] if any(row["size"] == "xl" and "fakeln" in row["method"] for row in rows) else []),
        ],
        order=("size", "corpus"),  # puts the methods of a corpus on adjacent lines
    )
    return spec.table(rows, job, notes=_shared_notes(rows), runs=_codes(of_form(found.scores, "gated")))


_FAKELN = f"{published.TABLE3_SOURCE}, not measured here. {published.TABLE3_REMARK}."


def _foot(rows: Sequence[Row], corpora: Sequence[str]) -> Iterator[list[str]]:
    """Yield the published rows, for a run that has no published size."""
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
    """Show the published mean and, in parentheses, the published gap in percent."""
    gap = shown(row["published_gap_percent"], ".2f", lost="")
    return shown(row["published_ce"], ".4f") + (f" ({gap})" if gap else "")


def stand_ins(rows: Sequence[Row]) -> str:
    """Return a sentence that names every column with another corpus than the published one; empty without such."""
    named = {row["label"]: published.TABLE3_COLUMNS[row["column"]] for row in rows}
    others = [f"{label} (for {theirs})" for label, theirs in named.items() if not label.startswith(theirs)]
    return f" Stand-ins: {'; '.join(others)}." if others else ""


def scale_notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a note for each tokenizer and context whose losses cannot be compared with the published ones."""
    ours = {(row["vocab_size"], row["context"]) for row in rows}
    for vocabulary, context in sorted(ours - {(published.TABLE3_VOCABULARY, published.TABLE3_CONTEXT)}):
        yield (
            f"The losses are not on the scale of {published.TABLE3_SHORT}'s. These are per token of a vocabulary of"
            f" {vocabulary:,} in rows of {context:,}. Theirs are per token of GPT-2's {published.TABLE3_VOCABULARY:,}"
            f" in rows of {published.TABLE3_CONTEXT:,}. Across tokenizers, only bits/byte (Table 3x) of the same text"
            " compare."
        )


def _shared_notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the notes on rows that are not finite, on the scale of the losses, and on the scored texts."""
    for row in rows:
        if row["nonfinite"]:
            yield (
                f"{_method(row)}, {row['size']}, {row['label']}: {row['nonfinite']:,} of {row['n'] * row['rows']:,}"
                " rows are not finite, so that there is no mean."
            )
    yield from scale_notes(rows)
    for row in {row["label"]: row for row in rows}.values():
        yield (
            f"{row['label']}: {row['rows']:,} rows of {row['context']:,} tokens scored."
            f" Source: {in_sentences(row['origin'])}"
        )


def _codes(scored: Sequence[Row]) -> list[Row]:
    """Return the evaluations and the fine-tunes behind them."""
    tuned = [row for row in scored if row["kind"] == "finetuned"]
    own = {"commit": "finetune_commit", "torch": "finetune_torch", "linear": "finetune_linear"}
    return [*scored, *(row | {name: row.get(column) for name, column in own.items()} for row in tuned)]


def _origin(scored: Sequence[Row]) -> Iterator[str]:
    """Yield the notes on base models and learning rates."""
    tuned = {row["size"]: row["lr"] for row in scored if row["kind"] == "finetuned"}
    bases = {row["size"]: row["base"] for row in scored}
    yield f"Base models: {'; '.join(f'{size} {base}' for size, base in bases.items())}."
    if tuned:
        yield f"Peak learning rate: {', '.join(f'{size} {rate:g}' for size, rate in tuned.items())}."
