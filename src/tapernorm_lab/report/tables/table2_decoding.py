"""Tables 2, 2x and 2v1: decoding speed without norms, as published, against better baselines, and without a cache."""

from collections.abc import Iterator, Sequence

from tapernorm.util.errors import UserError

from ...config import published
from ...config.jobs import ReportJob
from ..engine.cells import Cell, interval, number, significant, text, where
from ..engine.frame import Row
from ..engine.table_spec import Shown, TableSpec
from ..frames.decoding import CELL, MODES, NAN, Bench, arm_labels
from ..provenance import short_commits
from ..table import ABSENT, Table
from .table2_notes import setting, unavailable_notes

NAIVE, FUSED_NORM = "ratio_baseline_naive", "ratio_baseline"
_PAPER_ARMS = ("baseline_naive", "unfused", "fused")
READ = number("read_share", ".0f", scale=100)
_FEW = 6  # rounds below which even the range of the samples covers the median with less than 95 %
_SPEED = "tok/s: tokens per second, over all sequences of the batch, median over the rounds."
_RATIO = (
    "ratio: time of the Baseline divided by time of the row, paired by round, median over the rounds. In brackets: 95 %"
    " bootstrap intervals."
)
_SPELT_OUT = "Baseline: RMSNorm written as several operations, as in the paper's software."
_BOUND = "bound: the model without any norm. Its logits are meaningless. No removal of norms can be faster."
_FIXED = (
    "torch.compile and CUDA graphs keep one graph for all positions. Each step attends over the whole cache, as long as"
    " the longest prompt and its new tokens. The prompt therefore hardly changes their speed."
)


def table2(bench: Bench, job: ReportJob) -> Table:
    """Return Table 2: eager decoding with a key-value cache, relative to the paper's Baseline with the several-op norm.

    Raises:
        UserError: no eager decoding was measured.
    """
    rows = [row for row in _eager(bench, "decode", "table2") if row["arm"] in _PAPER_ARMS]
    labels = _labels(bench)
    spec = TableSpec(
        "table2",
        "Decoding with a key-value cache, eager.",
        columns=[
            *_heading(bench),
            Shown("tok/s", significant("tokens_per_s"), timed="speed", note=_SPEED),
            Shown("ratio", _ratio(NAIVE), timed="ratio", note=_RATIO),
        ],
        notes=[
            f"{_SPELT_OUT} Table 2x has Baseline with F.rms_norm, and the other modes.",
            f"Last rows: ranges published by {published.TABLE2_SOURCE}, over its settings. They are of"
            f" {published.TABLE2_SETTING}, not measured here.",
        ],
    )
    foot = [
        [published.TABLE2_SHORT, "all", labels[arm], ABSENT, f"{theirs.low:.2f}–{theirs.high:.2f}"]
        for arm, theirs in published.TABLE2_RATIO.items()
    ]
    records = [_record(bench, row, job) | _table2_published(row) for row in rows]
    return spec.table(records, job, published=foot, setting=setting(bench, rows), notes=_notes(bench, rows))


def _table2_published(row: Row) -> Row:
    theirs = published.TABLE2_RATIO.get(row["arm"])
    return {
        "published_ratio_low": theirs.low if theirs else NAN,
        "published_ratio_high": theirs.high if theirs else NAN,
        "published_source": published.TABLE2_SOURCE if theirs else "",
    }


def table2x(bench: Bench, job: ReportJob) -> Table:
    """Return Table 2x: decoding speed relative to Baseline with `F.rms_norm` in every mode, and its upper bound.

    Raises:
        UserError: nothing was decoded.
    """
    rows = [row for row in bench.rows if row["phase"] in ("decode", "prefill")]
    if not any(row["phase"] == "decode" for row in rows):
        raise UserError("table2x needs decoding in some mode, which was not measured: run `tapernorm bench decode`")
    better, ratio, fused = "Baseline, F.rms_norm", "ratio to F.rms_norm", arm_labels(bench)["fused"]
    alone = number(FUSED_NORM, ".3f")
    spec = TableSpec(
        "table2x",
        "Decoding speed relative to Baseline with F.rms_norm, by mode.",
        columns=[
            Shown("phase", text("phase"), align="l"),
            Shown("mode", lambda row: MODES[row["mode"]], align="l"),
            Shown("batch", text("batch")),
            Shown("prompt", text("prompt")),
            Shown("tok/s", _speed_alone, better, timed="speed", of="baseline", note=_SPEED),
            Shown("% of read", READ, better, timed="speed", of="baseline"),
            Shown("several-op", alone, ratio, timed="ratio", of="baseline_naive", note=_RATIO),
            Shown("unfused", _ratio(FUSED_NORM), ratio, timed="ratio", of="unfused"),
            Shown("fused", _ratio(FUSED_NORM), ratio, timed="ratio", of="fused"),
            Shown("bound", alone, ratio, timed="ratio", of="identity", note=_BOUND),
            Shown("GB/s", number("bytes_per_s", ",.1f", scale=1e-9), fused, timed="speed", of="fused"),
            Shown("% of read", READ, fused, timed="speed", of="fused"),
        ],
        notes=["several-op: Baseline with RMSNorm as several operations, as in Table 2.", _read_note(bench)],
        line=CELL,
        member="arm",
    )
    fixed = [_FIXED] if any(row["mode"] != "eager" for row in rows) else []
    notes = [*fixed, *_notes(bench, rows)]
    return spec.table([_record(bench, row, job) for row in rows], job, setting=setting(bench, rows), notes=notes)


def _read_note(bench: Bench) -> str:
    """Return the note on bytes/s and their share of the read bandwidth."""
    needed = "GB/s: the bytes of weights and cache that a decoded token must read, times tok/s"
    if bench.read_bandwidth is None:
        return f"{needed}. The device's read bandwidth was not measured."
    read = bench.read_bandwidth
    limit = interval("", ",.1f")({"": 1e-9 * read.value, "_low": 1e-9 * read.low, "_high": 1e-9 * read.high})
    return (
        f"{needed}. % of read: its share of the device's read bandwidth, {limit.strip()} GB/s. A reduction over a large"
        f" buffer measured that, n = {read.n}. Above 100 %, weights were read from a cache of the device."
    )


def table2v1(bench: Bench, job: ReportJob) -> Table:
    """Return Table 2v1: a forward pass of the whole prompt without a key-value cache, as in the paper's first version.

    Raises:
        UserError: no eager forward pass was measured.
    """
    rows, theirs = _eager(bench, "forward", "table2v1"), published.TABLE2V1_SHORT
    speed = _SPEED.replace("tok/s: tokens", "k tok/s: thousands of prompt tokens")
    spec = TableSpec(
        "table2v1",
        "Logits of the last token alone, by a forward pass of the whole prompt without a key-value cache, eager. The"
        " paper's first version measured this instead of Table 2.",
        columns=[
            *_heading(bench),
            Shown("k tok/s", significant("tokens_per_s", scale=1e-3), "this run", timed="speed", note=speed),
            Shown("ratio", _ratio(NAIVE), "this run", timed="ratio", note=_RATIO),
            Shown("to F.rms_norm", _ratio(FUSED_NORM), "this run", timed="ratio"),
            Shown("k tok/s", number("published_ktokens_per_s", ".1f"), theirs),
            Shown("ratio", number("published_ratio", ".3f"), theirs),
        ],
        notes=[
            f"{_SPELT_OUT} The model without any norm is a bound. Its logits are meaningless.",
            f"Columns {theirs}: published in {published.TABLE2V1_SOURCE}. They are not measured here. Their ratios are"
            " derived from its rounded rows. Rows below: published batches and prompts that this run lacks.",
        ],
    )
    records = [_record(bench, row, job) | _table2v1_published(row) for row in rows]
    foot = list(_table2v1_foot(bench, rows))
    return spec.table(records, job, published=foot, setting=setting(bench, rows), notes=_notes(bench, rows))


def _table2v1_foot(bench: Bench, rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the published rows whose batch and prompt this run lacks."""
    labels, here = _labels(bench), {(row["batch"], row["prompt"]) for row in rows}
    for line in published.TABLE2V1:
        if (line.batch, line.prompt) not in here:
            ours = [ABSENT] * 3
            yield [str(line.batch), str(line.prompt), labels["baseline_naive"], *ours, f"{line.baseline:.1f}", ABSENT]
            yield ["", "", labels["fused"], *ours, f"{line.fused:.1f}", f"{line.ratio:.3f}"]


def _table2v1_published(row: Row) -> Row:
    """Return the published numbers of the same batch, prompt and arm, which exist for Baseline and fused."""
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
    """Return the labels of a table whose Baseline is that of the paper."""
    return {**arm_labels(bench), "baseline_naive": "Baseline"}


def _heading(bench: Bench) -> list[Shown]:
    labels, place = _labels(bench), ("batch", "prompt")
    return [
        Shown("batch", text("batch"), align="l", once=place),
        Shown("prompt", text("prompt"), once=place),
        Shown("model", lambda row: labels[row["arm"]], align="l"),
    ]


def _ratio(name: str) -> Cell:
    """Show a ratio with its interval, and `ABSENT` for the baseline itself."""
    return where(lambda row: name != f"ratio_{row['arm']}", interval(name, ".3f"))


def _speed_alone(row: Row) -> str:
    return significant("tokens_per_s")(row).partition(" [")[0]


def _record(bench: Bench, row: Row, job: ReportJob) -> Row:
    return {"run": job.run, **row, **bench.facts}


def _notes(bench: Bench, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the notes: too few rounds, checks, modes not measured, state of the machine, and code."""
    if min(row["n"] for row in rows) < _FEW:
        yield f"Intervals of fewer than {_FEW} rounds are narrower than 95 % intervals."
    labels, facts = arm_labels(bench), bench.facts
    checks = [
        f"{labels.get(arm, arm)} {check['largest_logit_difference']:.1e} (logits' RMS {check['logit_scale']:.3g})"
        for arm, check in bench.checks.items()
    ]
    if checks:
        yield f"Largest difference from the gated model's logits at g = 0, before timing: {'; '.join(checks)}."
    yield from unavailable_notes(bench)
    tf32 = {True: "TF32 on", False: "TF32 off"}.get(facts["tf32"], "No TF32")
    clocks = "".join(f", {name} {value}" for name, value in bench.clocks.items())
    before, after = (ABSENT if facts[key] is None else f"{facts[key]:.2f}" for key in ("load_before", "load_after"))
    yield f"{tf32}{clocks}; load {before} before, {after} after. Code commit: {short_commits([facts])[0]}."
