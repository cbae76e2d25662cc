"""What Tables 3 and 3x and the figure of fine-tuning say in words."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ...config import published
from ...config.gpt2 import METHOD_LABELS
from ..frames.gpt2 import Row
from ..frames.gpt2_summary import THEIRS, VANILLA
from ..provenance import same_or_not, short_commits

_FEW = 1000  # rows; with fewer, the 99.9th percentile lies between the two worst


def stand_ins(rows: Sequence[Row]) -> str:
    """A sentence that names every column which is not the corpus of the published one; empty without such."""
    named = {row["label"]: published.TABLE3_COLUMNS[row["column"]] for row in rows}
    others = [f"{label} (for {theirs})" for label, theirs in named.items() if not label.startswith(theirs)]
    return f" Stand-ins: {'; '.join(others)}." if others else ""


def table3_notes(rows: Sequence[Row], scored: Sequence[Row]) -> Iterator[str]:
    """Notes under Table 3; `scored` are the scores behind it, one per model and corpus."""
    yield (
        "CE: mean over every row, a row over all of its targets, in float32, at the end state (g = 0, or all norms"
        " removed): mean ± sample standard deviation over n seeds."
    )
    yield (
        "gap %: 100 (L − L_Vanilla)/L_Vanilla, mean over paired seeds, in brackets its 95 % t interval; Original is"
        " compared with every seed's Vanilla."
    )
    yield (
        "Vanilla keeps every LayerNorm, Internal-TaperLN only the final one, All-TaperLN and FakeLN none."
        f"{_folding(rows)}"
    )
    yield from _not_finite(rows)
    yield from scale_notes(rows)
    yield from _published_notes(rows)
    yield from _missing_seeds(rows)
    yield _corpora(rows)
    bases = {row["size"]: row["base"] for row in scored}
    yield f"Base models: {'; '.join(f'{size} {base}' for size, base in bases.items())}."
    yield _origin(scored)


def table3x_notes(rows: Sequence[Row]) -> Iterator[str]:
    """Notes under Table 3x."""
    yield (
        "Over rows: of each row's mean loss; trimmed: 2.5 % of the rows cut at either end. Over tokens: of each"
        " target's loss, quantiles to within 0.01 %."
    )
    if any(row["n"] > 1 for row in rows):
        yield "Averaged over n seeds; max and the worst row are those of the seed whose worst row is worst."
    if any(row["rows"] < _FEW for row in rows):
        yield f"Of fewer than {_FEW:,} rows, p99.9 lies between the two worst."
    yield (
        "folded − gated: how far folding all its norms away moved a model's mean. bits/byte: total bits over the bytes"
        " of the targets' text, comparable across tokenizers."
    )
    yield (
        "The worst row by its index in the corpus; its text in ASCII, the rest escaped. The ten worst of every model"
        " are in its evaluation's JSON, whole."
    )
    if any(row["size"] == "xl" and "fakeln" in row["method"] for row in rows):
        yield f"{published.TABLE3_SOURCE}, not measured here: {published.TABLE3_REMARK}."
    yield from _not_finite(rows)
    yield from scale_notes(rows)
    yield _corpora(rows)


def scale_notes(rows: Sequence[Row]) -> Iterator[str]:
    """That a loss per token of another tokenizer or context is of another scale than the published."""
    ours = {(row["vocab_size"], row["context"]) for row in rows}
    for vocabulary, context in sorted(ours - {(published.TABLE3_VOCABULARY, published.TABLE3_CONTEXT)}):
        yield (
            f"Of another scale than {published.TABLE3_SHORT}: these losses are per token of a vocabulary of"
            f" {vocabulary:,} in rows of {context:,}, theirs of GPT-2's {published.TABLE3_VOCABULARY:,} in rows of"
            f" {published.TABLE3_CONTEXT:,}. Only bits/byte (Table 3x) compare across tokenizers, of the same text."
        )


def _folding(rows: Sequence[Row]) -> str:
    """How far folding moved the means, the largest over everything that was folded."""
    folded = [row for row in rows if row["n_folded"]]
    moved = [abs(row["folded_minus_gated"]) for row in folded if not math.isnan(row["folded_minus_gated"])]
    if not moved:
        return ""
    models = len({(row["size"], row["method"]) for row in folded})
    return (
        f" CE is of the model as trained; folding its norms into the linear maps moved the means of {models} size and"
        f" method pairs by at most {max(moved):.1e}."
    )


def _not_finite(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["nonfinite"]:
            yield (
                f"{METHOD_LABELS[row['method']]}, {row['size']}, {row['label']}: {row['nonfinite']:,} of"
                f" {row['n'] * row['rows']:,} rows are not finite, so that there is no mean."
            )


def _published_notes(rows: Sequence[Row]) -> Iterator[str]:
    own_columns = any(row["published_source"] for row in rows)
    place = "Columns published" if own_columns else f"Rows {published.TABLE3_SHORT}"
    gap = ", in parentheses their gap" if own_columns else ", with the gaps that follow from them"
    source = f"from {published.TABLE3_SOURCE}, fine-tuned by them, not measured here"
    yield f"{place}: {source}{gap}; {published.TABLE3_REMARK}."
    weights = [row for row in rows if row["method"].startswith(THEIRS) and row["published_source"]]
    apart = [100 * abs(row["ce_mean"] / row["published_ce"] - 1) for row in weights]
    if finite := [value for value in apart if not math.isnan(value)]:
        yield (
            f"Published weights: {published.TABLE3_SHORT}'s checkpoints, evaluated here; at most {max(finite):.2g} %"
            " from their own numbers."
        )


def _missing_seeds(rows: Sequence[Row]) -> Iterator[str]:
    """Which methods lack a seed that another of their size and corpus has."""
    for size in dict.fromkeys(row["size"] for row in rows):
        seeds = {row["method"]: set(row["seeds"].split()) for row in rows if row["size"] == size and row["seeds"]}
        union = set[str]().union(*seeds.values())
        for method, have in seeds.items():
            if missing := sorted(union - have, key=int):
                yield f"{size}: {METHOD_LABELS[method]} has no seed {', '.join(missing)}."
        if seeds and VANILLA not in seeds:
            yield f"{size}: Vanilla was not evaluated, so there is no gap."


def _corpora(rows: Sequence[Row]) -> str:
    """What was scored."""
    texts = {
        row["label"]: f"{row['label']} {row['rows']:,} of {row['context']:,} tokens ({row['origin']})" for row in rows
    }
    return f"Rows scored: {'; '.join(texts.values())}."


def _origin(scored: Sequence[Row]) -> str:
    """Learning rates, devices and code of fine-tunes and evaluations."""
    tuned = [row for row in scored if row["kind"] == "finetuned"]
    rates = ", ".join(f"{size} {rate:g}" for size, rate in {row["size"]: row["lr"] for row in tuned}.items())
    begun = f"Peak learning rate: {rates}. " if rates else ""
    devices = ", ".join(sorted({row["device"] for row in scored}))
    versions = {row["torch"] for row in scored} | {row["finetune_torch"] for row in tuned}
    return (
        f"{begun}Evaluated on {devices}. {same_or_not('PyTorch', versions)}. Code of the fine-tunes:"
        f" {_commits(tuned, 'finetune_commit')}; of the evaluations: {_commits(scored, 'commit')}."
    )


def codes(scored: Sequence[Row]) -> list[str]:
    """The code commits behind some scores, of fine-tuning and of evaluation."""
    tuned = [{"commit": row["finetune_commit"]} for row in scored if row["kind"] == "finetuned"]
    return short_commits([*tuned, *scored])


def _commits(rows: Sequence[Row], column: str) -> str:
    names: list[Any] = short_commits({"commit": row[column]} for row in rows)
    several = f"not all the same ({len(names)}): " if len(names) > 1 else ""
    return several + (", ".join(names) or "none")
