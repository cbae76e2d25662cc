"""Tables 2, 2x and 2v1: decoding speed without norms, as published, against better baselines, and without a cache."""

import math
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from ..errors import UserError
from . import published, stats
from .decode_notes import (
    FUSED_NORM,
    NAIVE,
    bandwidth_notes,
    decimals,
    number,
    ratio,
    reading_notes,
    run_notes,
    setting,
    spread,
    verdict,
)
from .decode_rows import MODES, Bench, Row, arm_labels, named
from .table import ABSENT, Column, Table

_TABLE2 = ("baseline_naive", "unfused", "fused")


def table2(bench: Bench, *, run: str, caption: str) -> Table:
    """Table 2: eager decoding with a key-value cache; Baseline is the paper's, with the several-op norm.

    Raises:
        UserError: no eager decoding was measured, or an arm of the table was not.
    """
    rows = _wanted(bench, "decode", _TABLE2, "table2")
    labels = {**arm_labels(bench), "baseline_naive": "Baseline"}
    lines = [
        [
            *_where(row, first=row["arm"] == _TABLE2[0]),
            labels[row["arm"]],
            spread(row, "tokens_per_s"),
            ratio(row, NAIVE),
        ]
        for row in rows
    ]
    theirs = [
        [published.TABLE2_SHORT, "all", labels[arm], ABSENT, f"{r.low:.2f}–{r.high:.2f}"]
        for arm, r in published.TABLE2_RATIO.items()
    ]
    return Table(
        name="table2",
        columns=[
            Column("batch", align="l"),
            Column("prompt"),
            Column("model", align="l"),
            Column("tok/s"),
            Column("ratio"),
        ],
        rows=lines,
        published=theirs,
        caption=f"Decoding with a key-value cache, eager. Run {run}: {caption} {setting(bench, rows)}",
        notes=[
            *reading_notes(rows),
            "Baseline: RMSNorm spelt out in several operations, as in the paper's software. Table 2x has the better"
            " Baseline and the other modes.",
            f"Last rows: ranges published by {published.TABLE2_SOURCE}, over its settings, on"
            f" {published.TABLE2_SETTING}; not measured here.",
            *run_notes(bench),
        ],
        frame=_frame(bench, rows, run, [_table2_published(row) for row in rows]),
    )


def table2x(bench: Bench, *, run: str, caption: str) -> Table:
    """Table 2x: what is left of the gain against `F.rms_norm` and in every mode, and how far it is from the limit.

    Raises:
        UserError: nothing was decoded, or a cell has no `baseline` arm.
    """
    rows = [row for row in bench.rows if row["phase"] in ("decode", "prefill")]
    if not any(row["phase"] == "decode" for row in rows):
        raise UserError("the benchmark decoded nothing: run `tapernorm bench decode`")
    if lacking := [row for row in rows if math.isnan(row[FUSED_NORM])]:
        raise UserError(f"{named(lacking[0])} has no arm 'baseline' to compare with: run the benchmark again")
    model = arm_labels(bench)["fused"]
    return Table(
        name="table2x",
        columns=[
            *(Column(header, align="l") for header in ("phase", "mode")),
            *(Column(header) for header in ("batch", "prompt")),
            *(Column(header, "Baseline, F.rms_norm") for header in ("tok/s", "% of read")),
            *(Column(header, "ratio to it") for header in ("several-op", "unfused", "fused", "bound")),
            *(Column(header, model) for header in ("GB/s", "% of read")),
        ],
        rows=list(_table2x_lines(rows)),
        published=[],
        caption=(
            "Decoding against the better Baseline (F.rms_norm), mode by mode."
            f" Run {run}: {caption} {setting(bench, rows)}"
        ),
        notes=[
            verdict(bench),
            "A gain counts where the intervals of the ratios to both Baselines, with F.rms_norm and with the several-op"
            " norm, lie above 1; yes: at every batch and prompt, in part: at some.",
            *reading_notes(rows),
            "several-op: Baseline with RMSNorm spelt out, as in Table 2. bound: the same model without any norm, the"
            " final one too; its logits mean nothing, no removal of norms can be faster.",
            *bandwidth_notes(bench, rows),
            *run_notes(bench),
        ],
        frame=_frame(bench, rows, run, [{} for _ in rows]),
    )


def table2v1(bench: Bench, *, run: str, caption: str) -> Table:
    """Table 2v1: what the paper's first version timed, a forward pass of the whole prompt without a key-value cache.

    Raises:
        UserError: no eager forward pass was measured, or an arm of the table was not.
    """
    everything = [row for row in bench.rows if row["phase"] == "forward"]
    rows = _wanted(bench, "forward", _TABLE2, "table2v1", others=True)
    labels = {**arm_labels(bench), "baseline_naive": "Baseline"}
    theirs = {(line.batch, line.prompt): line for line in published.TABLE2V1}
    lines = []
    for row in rows:
        speeds = [spread(row, "tokens_per_s", scale=1e-3), ratio(row, NAIVE), ratio(row, FUSED_NORM)]
        facts = _table2v1_published(row, theirs)
        lines.append(
            [
                *_where(row, first=row["arm"] == rows[0]["arm"]),
                labels[row["arm"]],
                *speeds,
                number(facts["published_ktokens_per_s"], ".1f"),
                number(facts["published_ratio"], ".3f"),
            ]
        )
    here = {(row["batch"], row["prompt"]) for row in rows}
    elsewhere = [line for place, line in theirs.items() if place not in here]
    foot = [
        [str(line.batch), str(line.prompt), labels[arm], *[ABSENT] * 3, f"{speed:.1f}", ratio]
        for line in elsewhere
        for arm, speed, ratio in (
            ("baseline_naive", line.baseline, ABSENT),
            ("fused", line.fused, f"{line.fused / line.baseline:.3f}"),
        )
    ]
    group = published.TABLE2V1_SHORT
    return Table(
        name="table2v1",
        columns=[
            Column("batch", align="l"),
            Column("prompt"),
            Column("model", align="l"),
            *(Column(header, "this run") for header in ("k tok/s", "ratio", "to F.rms_norm")),
            *(Column(header, group) for header in ("k tok/s", "ratio")),
        ],
        rows=lines,
        published=foot,
        caption=(
            "Logits of the last token alone, by a forward pass of the whole prompt without a key-value cache, eager:"
            " the measurement of the paper's first version, not that of Table 2."
            f" Run {run}: {caption} {setting(bench, rows)}"
        ),
        notes=[
            "k tok/s: thousands of prompt tokens per second.",
            *reading_notes(rows),
            "Baseline: RMSNorm spelt out in several operations; no norm at all: a bound, its logits mean nothing.",
            f"Columns {group}: published in {published.TABLE2V1_SOURCE}; not measured here, ratios derived from its"
            " rounded rows." + (" Last rows: its settings that this run has none of." if foot else ""),
            *run_notes(bench),
        ],
        frame=_frame(bench, everything, run, [_table2v1_published(row, theirs) for row in everything]),
    )


def _where(row: Row, *, first: bool) -> list[str]:
    """Batch and prompt, once for the lines that share them."""
    return [str(row["batch"]), str(row["prompt"])] if first else ["", ""]


def _wanted(bench: Bench, phase: str, arms: Sequence[str], name: str, *, others: bool = False) -> list[Row]:
    """Eager rows of a phase, with every one of `arms` in each cell; with `others`, the other arms too."""
    rows = bench.where(phase=phase, mode="eager")
    if not rows:
        verb = {"decode": DECODE, "forward": LAST_TOKEN}[phase].removeprefix("bench_")
        raise UserError(f"{name} needs the eager mode, which was not measured: run `tapernorm bench {verb}` with it")
    for place in {(row["batch"], row["prompt"]): row for row in rows}.values():
        have = [row["arm"] for row in rows if named(row) == named(place)]
        if missing := [arm for arm in arms if arm not in have]:
            raise UserError(f"{name}: {named(place)} has no arm {', '.join(missing)}: run the benchmark again")
    return rows if others else [row for row in rows if row["arm"] in arms]


def _table2x_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(named(row), {})[row["arm"]] = row
    for arms in cells.values():
        base, fused = arms["baseline"], arms.get("fused")
        medians = [number(arms[a][FUSED_NORM], ".3f") if a in arms else ABSENT for a in ("baseline_naive", "identity")]
        ratios = [ratio(arms[a], FUSED_NORM) if a in arms else ABSENT for a in ("unfused", "fused")]
        speed = f"{base['tokens_per_s']:,.{max(0, 3 - math.floor(math.log10(base['tokens_per_s'])))}f}"
        yield [
            *(base["phase"], MODES[base["mode"]], str(base["batch"]), str(base["prompt"])),
            *(speed, _share(base), medians[0], *ratios, medians[1]),
            *(number(1e-9 * fused["bytes_per_s"], ".3g") if fused else ABSENT, _share(fused)),
        ]


def _share(row: Row | None) -> str:
    return number(100 * row["read_share"], ".0f") if row else ABSENT


def _frame(bench: Bench, rows: Sequence[Row], run: str, theirs: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame([{"run": run, **row, **bench.facts, **extra} for row, extra in zip(rows, theirs, strict=True)])


def _table2_published(row: Row) -> Row:
    theirs = published.TABLE2_RATIO.get(row["arm"])
    return {
        "published_ratio_low": theirs.low if theirs else stats.NAN,
        "published_ratio_high": theirs.high if theirs else stats.NAN,
        "published_source": published.TABLE2_SOURCE if theirs else "",
    }


def _table2v1_published(row: Row, theirs: Mapping[tuple[int, int], published.LastToken]) -> Row:
    """The published numbers of the same batch, prompt and arm; only Baseline and fused were, both eager."""
    line = theirs.get((row["batch"], row["prompt"])) if row["mode"] == "eager" else None
    speed = {"baseline_naive": line.baseline, "fused": line.fused}.get(row["arm"], stats.NAN) if line else stats.NAN
    return {
        "published_ktokens_per_s": speed,
        "published_ratio": line.fused / line.baseline if line and row["arm"] == "fused" else stats.NAN,
        "published_source": "" if math.isnan(speed) else published.TABLE2V1_SOURCE,
    }
