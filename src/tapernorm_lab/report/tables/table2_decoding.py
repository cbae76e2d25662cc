"""Tables 2, 2x and 2v1: decoding speed without norms, as published, against better baselines, and without a cache."""

from collections.abc import Iterator, Mapping, Sequence

from tapernorm.util.errors import UserError

from ...config import published
from ...config.jobs import ReportJob
from ..frames.decoding import (
    ARMS,
    MODES,
    NAN,
    Bench,
    Row,
    arm_labels,
    named,
)
from ..table import ABSENT, Column, Table
from .table2_notes import (
    FUSED_NORM,
    NAIVE,
    bandwidth_notes,
    decimals,
    fixed_notes,
    number,
    ratio,
    reading_notes,
    run_notes,
    setting,
    spread,
    verdict,
)

_MODEL = [Column("batch", align="l"), Column("prompt"), Column("model", align="l")]
_PAPER_ARMS = ("baseline_naive", "unfused", "fused")


def table2(bench: Bench, job: ReportJob) -> Table:
    """Table 2: eager decoding with a key-value cache; Baseline is the paper's, with the several-op norm.

    Raises:
        UserError: no eager decoding was measured.
    """
    rows = [row for row in _eager(bench, "decode", "table2") if row["arm"] in _PAPER_ARMS]
    labels = _labels(bench)
    return Table(
        name="table2",
        columns=[*_MODEL, Column("tok/s", timed="speed"), Column("ratio", timed="ratio")],
        rows=[[*_heading(row), labels[row["arm"]], spread(row, "tokens_per_s"), ratio(row, NAIVE)] for row in rows],
        published=[
            [published.TABLE2_SHORT, "all", labels[arm], ABSENT, f"{theirs.low:.2f}–{theirs.high:.2f}"]
            for arm, theirs in published.TABLE2_RATIO.items()
        ],
        caption=f"Decoding with a key-value cache, eager. Run {job.run}: {job.caption} {setting(bench, rows)}",
        notes=[
            *reading_notes(rows),
            "Baseline: RMSNorm spelt out in several operations, as in the paper's software. Table 2x has the better"
            " Baseline and the other modes.",
            f"Last rows: ranges published by {published.TABLE2_SOURCE}, over its settings, on"
            f" {published.TABLE2_SETTING}; not measured here.",
            *run_notes(bench),
        ],
        records=_records(bench, rows, job.run, [_table2_published(row) for row in rows]),
    )


def _table2_published(row: Row) -> Row:
    theirs = published.TABLE2_RATIO.get(row["arm"])
    return {
        "published_ratio_low": theirs.low if theirs else NAN,
        "published_ratio_high": theirs.high if theirs else NAN,
        "published_source": published.TABLE2_SOURCE if theirs else "",
    }


def table2x(bench: Bench, job: ReportJob) -> Table:
    """Table 2x: what is left of the gain against `F.rms_norm` and in every mode, and how far it is from the limit.

    Raises:
        UserError: nothing was decoded.
    """
    rows = [row for row in bench.rows if row["phase"] in ("decode", "prefill")]
    if not any(row["phase"] == "decode" for row in rows):
        raise UserError("table2x needs decoding, which was not measured: run `tapernorm bench decode` in some mode")
    better, fused = "Baseline, F.rms_norm", arm_labels(bench)["fused"]
    return Table(
        name="table2x",
        columns=[
            *(Column(header, align="l") for header in ("phase", "mode")),
            *(Column(header) for header in ("batch", "prompt")),
            *(Column(header, better, timed="speed") for header in ("tok/s", "% of read")),
            *(Column(header, "ratio to it", timed="ratio") for header in ("several-op", "unfused", "fused", "bound")),
            *(Column(header, fused, timed="speed") for header in ("GB/s", "% of read")),
        ],
        rows=list(_table2x_lines(rows)),
        published=[],
        caption=f"Decoding against the better Baseline, by mode. Run {job.run}: {job.caption} {setting(bench, rows)}",
        notes=[
            verdict(bench),
            "A gain counts where the intervals of the ratios to both Baselines, with F.rms_norm and with the several-op"
            " norm, lie above 1, a loss where either lies below. Yes: a gain everywhere; in part: at some; not"
            " shown: neither gain nor loss at any.",
            *reading_notes(rows),
            "several-op: Baseline with RMSNorm spelt out, as in Table 2. bound: the model without any norm, the final"
            " one too; its logits mean nothing, and removing norms can gain no more.",
            *bandwidth_notes(bench, rows),
            *fixed_notes(rows),
            *run_notes(bench),
        ],
        records=_records(bench, rows, job.run),
    )


def _table2x_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """One line per phase, mode, batch and prompt."""
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(named(row), {})[row["arm"]] = row
    for arms in cells.values():
        base, fused, speed = arms["baseline"], arms["fused"], arms["baseline"]["tokens_per_s"]
        yield [
            *(base["phase"], MODES[base["mode"]], str(base["batch"]), str(base["prompt"])),
            *(f"{speed:,.{decimals(speed)}f}", number(100 * base["read_share"], ".0f")),
            number(arms["baseline_naive"][FUSED_NORM], ".3f"),
            *(ratio(arms[arm], FUSED_NORM) for arm in ("unfused", "fused")),
            number(arms["identity"][FUSED_NORM], ".3f"),
            *(number(1e-9 * fused["bytes_per_s"], ",.1f"), number(100 * fused["read_share"], ".0f")),
        ]


def table2v1(bench: Bench, job: ReportJob) -> Table:
    """Table 2v1: what the paper's first version timed, a forward pass of the whole prompt without a key-value cache.

    Raises:
        UserError: no eager forward pass was measured.
    """
    rows, theirs = _eager(bench, "forward", "table2v1"), published.TABLE2V1_SHORT
    foot = list(_table2v1_foot(bench, rows))
    return Table(
        name="table2v1",
        columns=[
            *_MODEL,
            Column("k tok/s", "this run", timed="speed"),
            *(Column(header, "this run", timed="ratio") for header in ("ratio", "to F.rms_norm")),
            *(Column(header, theirs) for header in ("k tok/s", "ratio")),
        ],
        rows=list(_table2v1_lines(bench, rows)),
        published=foot,
        caption=(
            "Logits of the last token alone, by a forward pass of the whole prompt without a key-value cache, eager:"
            " what the paper's first version measured, not what Table 2 does."
            f" Run {job.run}: {job.caption} {setting(bench, rows)}"
        ),
        notes=[
            *reading_notes(rows, "k tok/s: thousands of prompt tokens per second"),
            "Baseline: RMSNorm spelt out in several operations. No norm at all: a bound, its logits mean nothing.",
            f"Columns {theirs}: published in {published.TABLE2V1_SOURCE}; not measured here, ratios derived from its"
            " rounded rows." + (" Last rows: its batches and prompts that this run has not." if foot else ""),
            *run_notes(bench),
        ],
        records=_records(bench, rows, job.run, [_table2v1_published(row) for row in rows]),
    )


def _table2v1_lines(bench: Bench, rows: Sequence[Row]) -> Iterator[list[str]]:
    labels = _labels(bench)
    for row in rows:
        theirs = _table2v1_published(row)
        yield [
            *(*_heading(row), labels[row["arm"]], spread(row, "tokens_per_s", scale=1e-3)),
            *(ratio(row, NAIVE), ratio(row, FUSED_NORM)),
            *(number(theirs["published_ktokens_per_s"], ".1f"), number(theirs["published_ratio"], ".3f")),
        ]


def _table2v1_foot(bench: Bench, rows: Sequence[Row]) -> Iterator[list[str]]:
    """Published rows that have none of ours beside them."""
    labels, here = _labels(bench), {(row["batch"], row["prompt"]) for row in rows}
    for line in published.TABLE2V1:
        if (line.batch, line.prompt) not in here:
            ours = [ABSENT] * 3
            yield [str(line.batch), str(line.prompt), labels["baseline_naive"], *ours, f"{line.baseline:.1f}", ABSENT]
            yield ["", "", labels["fused"], *ours, f"{line.fused:.1f}", f"{line.ratio:.3f}"]


def _table2v1_published(row: Row) -> Row:
    """The published numbers of the same batch, prompt and arm; only Baseline and fused were published."""
    for line in published.TABLE2V1:
        if (line.batch, line.prompt) == (row["batch"], row["prompt"]) and row["arm"] in ("baseline_naive", "fused"):
            fused = row["arm"] == "fused"
            return {
                "published_ktokens_per_s": line.fused if fused else line.baseline,
                "published_ratio": line.ratio if fused else NAN,
                "published_source": published.TABLE2V1_SOURCE,
            }
    return {"published_ktokens_per_s": NAN, "published_ratio": NAN, "published_source": ""}


def _eager(bench: Bench, phase: str, name: str) -> list[Row]:
    if rows := bench.where(phase=phase, mode="eager"):
        return rows
    verb = {"decode": "decode", "forward": "last_token"}[phase]
    raise UserError(f"{name} needs eager mode, which was not measured: run `tapernorm bench {verb}` with it")


def _labels(bench: Bench) -> dict[str, str]:
    """The labels of a table whose Baseline is the paper's."""
    return {**arm_labels(bench), "baseline_naive": "Baseline"}


def _heading(row: Row) -> list[str]:
    """Batch and prompt, once for the lines that share them."""
    return [str(row["batch"]), str(row["prompt"])] if row["arm"] == ARMS[0] else ["", ""]


def _records(bench: Bench, rows: Sequence[Row], run: str, theirs: Sequence[Mapping[str, object]] = ()) -> list[Row]:
    more = theirs or [{}] * len(rows)
    return [{"run": run, **row, **bench.facts, **extra} for row, extra in zip(rows, more, strict=True)]
