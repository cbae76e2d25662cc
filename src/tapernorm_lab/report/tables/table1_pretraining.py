"""Table 1: validation loss per width and variant, and the relative gap to Baseline paired by seed."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from tapernorm.util.errors import UserError

from ...config import published
from ...config.jobs import ReportJob
from ...config.variants import VARIANT_LABELS, VARIANTS, Variant
from ..engine import statistics as stats
from ..engine.cells import interval, mean_sd, number, text
from ..engine.frame import Row
from ..engine.summary import Against, refuse_unlike, summarise
from ..engine.table_spec import Shown, TableSpec
from ..provenance import short_commits
from ..table import ABSENT, Table

SHOWN = ("baseline", "internal_aux", "all_aux")  # printed variants; the CSV holds all that ran
FORMS = ("unfused", "fused")  # how a tapered model is folded
LOSS, GAP = mean_sd("valid_ce", ".4f"), interval("gap_percent", ".2f", ends="gap", pairs="n_pairs")
LOSS_NOTE = (
    "loss: validation cross-entropy in nats/token, of tapered models at g = 0. It is mean ± sample standard deviation"
    " over n seeds."
)
GAP_NOTE = "gap %: mean over paired seeds of 100 (L − L_Baseline)/L_Baseline, in brackets its 95 % t interval."
ALL_SEEDS, TRIMMED = "all", "without outliers"
_SAME = ("steps", "lr", "batch", "context", "valid_tokens")  # at one width, or its losses are not comparable


def table1(found: tuple[pd.DataFrame, pd.DataFrame], job: ReportJob) -> Table:
    """Return Table 1 of a run, from its results and curves.

    Raises:
        UserError: there is no result, or runs of one width differ in steps, learning rate, batch or validation text.
    """
    jobs: list[Row] = found[0].to_dict("records")
    rows = table1_rows(jobs, run=job.run, labels=job.labels)
    lines = _printed(rows)
    spec = TableSpec(
        "table1",
        "Validation loss and relative gap to Baseline.",
        line=("d_model", "seeds_counted"),
        member="variant",
        printed=lambda row: _line_of(row) in lines,
        columns=[
            Shown("size", _size, align="l"),
            Shown("d", text("d_model")),
            Shown("parameters", number("parameters", ",")),
            Shown("steps", number("steps", ",")),
            Shown("n", lambda row: lines[_line_of(row)]),
            Shown("loss", LOSS, VARIANT_LABELS["baseline"], of="baseline", note=LOSS_NOTE),
            *(
                Shown(header, cell, VARIANT_LABELS[variant], of=variant, note=note)
                for variant in SHOWN[1:]
                for header, cell, note in (("loss", LOSS, LOSS_NOTE), ("gap %", GAP, GAP_NOTE))
            ),
        ],
    )
    return spec.table(rows, job, published=[_published_line()], notes=_notes(jobs, rows), runs=jobs)


def table1_rows(jobs: Sequence[Row], *, run: str, labels: Mapping[int, str] | None = None) -> list[Row]:
    """Return one row per width, seeds counted (all; and without outliers, if there are any) and variant."""
    if not jobs:
        raise UserError(f"run {run} has no results: run its trainings first")
    refuse_unlike(jobs, "d_model", _SAME)
    rows = []
    for d_model in sorted({job["d_model"] for job in jobs}):
        width = sorted((job for job in jobs if job["d_model"] == d_model), key=_order)
        losses = {v: {job["seed"]: job["valid_ce"] for job in width if job["variant"] == v} for v in VARIANTS}
        left_out = {variant: stats.outliers(of_seeds) for variant, of_seeds in losses.items()}
        kept = [job for job in width if job["seed"] not in left_out[job["variant"]]]
        common = {"run": run, "size": (labels or {}).get(d_model, str(d_model)), "d_model": d_model}
        rows += [{**common, "seeds_counted": ALL_SEEDS, **row} for row in _variant_rows(width, {})]
        if any(left_out.values()):
            rows += [{**common, "seeds_counted": TRIMMED, **row} for row in _variant_rows(kept, left_out)]
    return rows


def _order(job: Row) -> tuple[int, int]:
    return VARIANTS.index(job["variant"]), job["seed"]


def _variant_rows(jobs: Sequence[Row], left_out: Mapping[str, Mapping[int, float]]) -> Iterator[Row]:
    """Yield the statistics of each variant of one width."""
    pair = {"gap": Against(lambda _: {"variant": "baseline"})}
    for cell in summarise(jobs, ["variant"], "valid_ce", pair):
        first, variant, pairs = cell.rows[0], cell.key["variant"], cell.gaps["gap"].seeds
        theirs = published.TABLE1_GAP_PERCENT.get(variant)
        yield {
            "variant": variant,
            **{key: first[key] for key in ("parameters", "steps", "lr")},
            "n": cell.n,
            "seeds": cell.seeds,
            "valid_ce_mean": cell.mean,
            "valid_ce_std": cell.sd,
            "bits_per_byte_mean": cell.average("bits_per_byte"),
            "n_pairs": len(pairs),
            "paired_seeds": " ".join(map(str, pairs)),
            **cell.gap("gap", value="gap_percent"),
            "left_out": ", ".join(f"seed {s} ({mads:.1f} MAD)" for s, mads in left_out.get(variant, {}).items()),
            "published_gap_low": theirs.low if theirs else stats.NAN,
            "published_gap_high": theirs.high if theirs else stats.NAN,
            "published_source": published.TABLE1_SOURCE if theirs else "",
            "commits": " ".join(short_commits(cell.rows)),
        }


def _printed(rows: Sequence[Row]) -> dict[tuple[int, str], str]:
    """Return printed line (width, seeds counted) -> n. A line without outliers is printed only if it differs."""
    lines: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        lines.setdefault(_line_of(row), []).append(row)
    found = {}
    for line, members in lines.items():
        mine = [row for row in members if row["variant"] in SHOWN]
        if line[1] == ALL_SEEDS or any(row["left_out"] for row in mine):
            ns = [str(row["n"]) for row in mine]
            found[line] = "/".join(ns if len(set(ns)) > 1 else ns[:1]) or ABSENT
    return found


def _line_of(row: Row) -> tuple[int, str]:
    return row["d_model"], row["seeds_counted"]


def _size(row: Row) -> str:
    return row["size"] + ("†" if row["seeds_counted"] == TRIMMED else "")


def table1_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield Table 1 for a terminal of 80 columns: a line per width, seeds counted and printed variant."""
    line = "{:<8} {:>4} {:>3}  {:<21}  {:<15}  {}".format
    yield line("size", "d", "n", "variant", "loss", "gap % to Baseline")
    last = None
    for row in (dict(row) for row in rows if row["variant"] in SHOWN):
        size = _size(row)
        named = ("", "") if size == last else (size, row["d_model"])
        yield line(*named, row["n"], VARIANT_LABELS[row["variant"]], LOSS(row), GAP(row))
        last = size
    for variant, theirs in published.TABLE1_GAP_PERCENT.items():
        if variant in SHOWN:
            gap = f"{theirs.low}–{theirs.high}, published for 1M–30M"
            yield line("paper", "", published.TABLE1_SEEDS, VARIANT_LABELS[variant], ABSENT, gap)


def _published_line() -> list[str]:
    gaps = [f"{r.low}–{r.high}" for r in (published.TABLE1_GAP_PERCENT[v] for v in SHOWN[1:])]
    who = f"{published.TABLE1_SHORT}, four sizes"
    return [who, "64–512", "1M–30M", ABSENT, str(published.TABLE1_SEEDS), ABSENT, ABSENT, gaps[0], ABSENT, gaps[1]]


def _notes(jobs: Sequence[Row], rows: Sequence[Row]) -> Iterator[str]:
    """Yield the notes: the effect of folding, the seeds left out, and settings in which runs differ."""
    folded = [job for job in jobs if not math.isnan(job["valid_ce_gated"])]
    if folded:
        shift = max(abs(job[f"valid_ce_{form}"] - job["valid_ce_gated"]) for job in folded for form in FORMS)
        yield f"Folding the norms of the {len(folded)} tapered models changed a loss by at most {shift:.1e} nats/token."
    left_out = [row for row in rows if row["left_out"] and row["variant"] in SHOWN]
    if left_out:
        yield (
            f"†: without the seeds whose loss lies more than {stats.MAX_MADS:g} MAD (median absolute deviation) from"
            " their variant's median."
        )
    for size in dict.fromkeys(row["size"] for row in left_out):
        named = [f"{VARIANT_LABELS[row['variant']]} {row['left_out']}." for row in left_out if row["size"] == size]
        yield f"{size}† leaves out: {' '.join(named)}"
    remarks = [f" {VARIANT_LABELS[v]}, {r.note}." for v, r in published.TABLE1_GAP_PERCENT.items() if r.note]
    yield f"Last row: published by {published.TABLE1_SOURCE}, not measured here.{''.join(remarks)}"
    yield f"Peak learning rate {', '.join(f'{rate:g}' for rate in sorted({job['lr'] for job in jobs}))}."
    tapered = [job for job in jobs if Variant.named(job["variant"]).tapers]
    for what, some in {"settings": jobs, "taper": tapered}.items():
        if len(versions := {job[f"{what}_hash"] for job in some}) > 1:
            yield f"The runs are of {len(versions)} versions of the config: {what} differ."
