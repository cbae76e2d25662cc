"""The estimates on which the claims of the paper are judged, from the rows of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ..config import published
from ..config.jobs import ClaimsJob
from ..config.variants import PAPER_VARIANTS, VARIANT_LABELS
from .engine import statistics as stats
from .engine.frame import Row
from .engine.summary import Against, summarise
from .frames.decoding import Bench
from .frames.gpt2_summary import published_gap, table3_rows
from .tables.table2_decoding import NAIVE
from .verdicts import Estimate

NORMED = tuple(variant.name for variant in PAPER_VARIANTS if not variant.final)  # variants that keep the final norm
NORMLESS = tuple(variant.name for variant in PAPER_VARIANTS if variant.final)
ANCHORED = tuple(v.name for v in PAPER_VARIANTS if v.anchored or not v.final)  # variants with final norm or scale loss
LATE = 0.1  # last share of the logged steps, in which the gate is nearly 0
FOLD_TOLERANCE = 1e-4  # nats/token: a hundredth of the smallest gap that the paper reports of a loss near 1.5
RADIAL_WITH, RADIAL_WITHOUT = 1e-4, 1e-2  # |cos| between gradient and stream; a random direction has about d^-1/2
_JUDGED = ("owt", "pile_filtered")  # not the whole Pile, where three rows dominate the published mean of one size

Found = tuple[list[Estimate], str, str]  # estimates, how the setting differs from the claim's, what is missing
Late = Mapping[str, NDArray[np.float64]]  # variant -> mean log at the end of training, per seed


@dataclass(frozen=True)
class Measured:
    """The rows that a run measured; None for those that it did not."""

    results: pd.DataFrame
    curves: pd.DataFrame
    text: str  # source of the pre-training text
    decode: Bench | None = None
    last_token: Bench | None = None
    gpt2: Sequence[Row] | None = None  # rows of Table 3

    @classmethod
    def of(cls, found: Mapping[str, Any], job: ClaimsJob) -> "Measured":
        """Collect the rows of each measured source."""
        (results, curves), gpt2 = found["training"], found.get("gpt2")
        rows = None if gpt2 is None else table3_rows(gpt2.scores, run=job.run)
        return cls(results, curves, job.text, found.get("decode"), found.get("last_token"), rows)

    @property
    def unlike_pretraining(self) -> str:
        """How the runs differ from those of Table 1 in text, shape or batch; empty if they do not."""
        theirs = published.TABLE1_SHAPE
        ours = {name: sorted(set(self.results[name])) for name in theirs}
        different = [
            f"{name} {', '.join(map(str, ours[name]))} instead of {theirs[name]}"
            for name in theirs
            if ours[name] != [theirs[name]]
        ]
        different += (
            [f"text {self.text} instead of {published.TABLE1_TEXT}"] if self.text != published.TABLE1_TEXT else []
        )
        return f"the setting is not the claim's: {', '.join(different)}" if different else ""


Measure = Callable[[Measured], Found]


def over_seeds(at: str, values: ArrayLike, least: float = -math.inf, most: float = math.inf) -> Estimate:
    """Estimate the mean of one value per seed, with its 95 % t interval."""
    return Estimate(at, *stats.mean_interval(values), np.size(values), least, most)


def over_models(at: str, values: ArrayLike, most: float) -> Estimate:
    """Estimate the largest value over models, without an interval: an identity must hold for every model."""
    largest = float(np.max(np.asarray(values, dtype=np.float64)))
    return Estimate(at, largest, largest, largest, np.size(values), most=most)


def loss_gaps(variant: str) -> Measure:
    """Measure the gaps of Table 1: to Baseline in percent, paired by seed, per width; bounds: the published range."""
    theirs = published.TABLE1_GAP_PERCENT[variant]
    pair = {"gap": Against(lambda _: {"variant": "baseline"})}

    def measure(measured: Measured) -> Found:
        cells = summarise(measured.results, ["d_model", "variant"], "valid_ce", pair)
        estimates = [
            Estimate(f"d {c.key['d_model']}", gap.value, gap.low, gap.high, len(gap.seeds), theirs.low, theirs.high)
            for c in sorted(cells, key=lambda c: c.key["d_model"])
            if c.key["variant"] == variant and (gap := c.gaps["gap"]).seeds
        ]
        widths = {int(d) for d in measured.results["d_model"]}
        absent = [str(d) for d in published.PRETRAIN_HOURS_H100 if d not in widths]
        missing = f"d {', '.join(absent)} did not run" if absent else ""
        return estimates, measured.unlike_pretraining, missing

    return measure


def radial_shares(measured: Measured) -> Found:
    """Measure the radial shares per width: each seed's largest with a final norm, and its smallest without."""
    estimates, missing = [], []
    for d, width in measured.results.groupby("d_model"):
        normed, normless = _shares(width, NORMED, np.max), _shares(width, NORMLESS, np.min)
        if normed and normless:
            estimates.append(over_seeds(f"with, d {d}", normed, most=RADIAL_WITH))
            estimates.append(over_seeds(f"without, d {d}", normless, least=RADIAL_WITHOUT))
        else:
            missing.append(f"d {d} ran nothing {'without' if normed else 'with'} a final norm")
    return estimates, "", "; ".join(missing)


def _shares(width: pd.DataFrame, variants: Sequence[str], pick: Callable[[ArrayLike], Any]) -> list[float]:
    """Return one radial share per seed, which `pick` takes from those of some variants."""
    some = width[width["variant"].isin(variants)]
    return [float(pick(group.to_numpy())) for _, group in some.groupby("seed")["radial_share"]]


def late_logs(curves: pd.DataFrame, metric: str) -> dict[int, Late]:
    """Return width -> variant -> mean log of `metric` at the end of training, for each seed that all variants have."""
    found = {}
    for d, width in curves.dropna(subset=[metric]).groupby("d_model"):
        steps = sorted(set(width["step"]))
        late = width[width["step"] >= steps[-max(1, round(LATE * len(steps)))]]
        logs = late.assign(log=np.log(late[metric])).pivot_table(index="seed", columns="variant", values="log")
        found[int(str(d))] = {str(v): logs.dropna()[v].to_numpy() for v in logs.columns}
    return found


def at_the_end(metric: str, estimates: Callable[[str, Late], Sequence[Estimate]], missing: str) -> Measure:
    """Measure `metric` at the end of training, per width. `missing` is the reason if no width has an estimate."""

    def measure(measured: Measured) -> Found:
        late = late_logs(measured.curves, metric).items()
        found = [estimate for d, logs in late for estimate in estimates(f"d {d}", logs)]
        return found, measured.unlike_pretraining, "" if found else missing

    return measure


def growth_of_logits(at: str, late: Late) -> Sequence[Estimate]:
    """Estimate the ratio of All-Taper's logit RMS to that of each variant with final norm or scale loss."""
    anchored = [variant for variant in ANCHORED if {"all", variant} <= set(late)]
    ratios = {v: np.exp(late["all"] - late[v]) for v in anchored}  # seed by seed
    logs = [over_seeds(f"to {VARIANT_LABELS[v]}, {at}", np.log(ratio)) for v, ratio in ratios.items()]
    return [Estimate(e.at, math.exp(e.value), math.exp(e.low), math.exp(e.high), e.n, least=1.0) for e in logs]


def clustering(at: str, late: Late) -> Sequence[Estimate]:
    """Estimate the distance of All-Taper's log gradient norm from the normed variants, minus their range."""
    if not {*NORMED, "all"} <= set(late):
        return []
    normed = np.array([late[v] for v in NORMED])
    return [over_seeds(at, np.abs(late["all"] - normed.mean(axis=0)) - np.ptp(normed, axis=0), least=0.0)]


def restoring(at: str, late: Late) -> Sequence[Estimate]:
    """Estimate half the log distance of All-Taper to the normed variants, minus that of All-Taper (+aux)."""
    normed = [late[v] for v in NORMED if v in late]
    if not normed or not {"all", "all_aux"} <= set(late):
        return []
    centre = np.mean(normed, axis=0)
    return [over_seeds(at, np.abs(late["all"] - centre) / 2 - np.abs(late["all_aux"] - centre), least=0.0)]


def folding(measured: Measured) -> Found:
    """Measure the largest change of the validation loss by folding, over all models."""
    folded = measured.results.dropna(subset=["valid_ce_gated"])
    moved = {form: (folded[f"valid_ce_{form}"] - folded["valid_ce_gated"]).abs() for form in ("unfused", "fused")}
    moved["GPT-2, fused"] = pd.Series([abs(r["folded_minus_gated"]) for r in measured.gpt2 or () if r["n_folded"]])
    return [over_models(at, values, FOLD_TOLERANCE) for at, values in moved.items() if len(values)], "", ""


def speed(bench: str, phase: str, arm: str, least: float, most: float) -> Measure:
    """Measure the speed relative to the several-op Baseline in eager mode, per batch and prompt."""

    def measure(measured: Measured) -> Found:
        timed: Bench | None = getattr(measured, bench)
        if timed is None:
            return [], "", "no benchmark was given"
        estimates = [
            Estimate(
                f"batch {row['batch']}, prompt {row['prompt']}",
                row[NAIVE],
                row[f"{NAIVE}_low"],
                row[f"{NAIVE}_high"],
                row["n"],
                least,
                most,
            )
            for row in timed.where(phase=phase, mode="eager", arm=arm)
        ]
        facts, theirs = timed.facts, published.TABLE2_MODEL
        different = [
            f"{name} {facts[name]} instead of {theirs[name]}" for name in theirs if facts[name] != theirs[name]
        ]
        if published.TABLE2_DEVICE not in facts["device"]:
            different.append(f"device {facts['device']} instead of {published.TABLE2_DEVICE}")
        unlike = f"the setting is not the claim's: {', '.join(different)}" if different else ""
        return estimates, unlike, "" if estimates else "eager mode was not measured"

    return measure


def gpt2_gaps(method: str) -> Measure:
    """Measure the gap of one method to Vanilla, per size and corpus; bound: the largest published gap of FakeLN."""

    def measure(measured: Measured) -> Found:
        mine = [row for row in measured.gpt2 or () if row["method"] == method and row["column"] in _JUDGED]
        most = {c: max(published_gap(size, "fakeln", c) for size in published.TABLE3) for c in _JUDGED}
        estimates = [
            Estimate(
                f"{row['size']}, {row['label']}",
                row["gap_percent"],
                row["gap_low"],
                row["gap_high"],
                row["n_pairs"],
                most=most[row["column"]],
            )
            for row in mine
        ]
        absent = [size for size in published.TABLE3 if size not in {row["size"] for row in mine}]
        missing = "no GPT-2 was fine-tuned by it" if not mine else f"{', '.join(absent)} did not run" if absent else ""
        return estimates, _unlike_gpt2(mine), missing

    return measure


def _unlike_gpt2(rows: Sequence[Row]) -> str:
    ours = {(row["vocab_size"], row["context"]) for row in rows}
    other = sorted(ours - {(published.TABLE3_VOCABULARY, published.TABLE3_CONTEXT)})
    different = [f"a vocabulary of {vocabulary:,} in rows of {context:,}" for vocabulary, context in other]
    theirs = {row["label"]: published.TABLE3_COLUMNS[row["column"]] for row in rows}
    different += [f"{label} for {name}" for label, name in theirs.items() if not label.startswith(name)]
    sizes = sorted({row["size"] for row in rows} - set(published.TABLE3))
    different += [f"sizes {', '.join(sizes)}"] if sizes else []
    return f"models and texts are not the claim's: {'; '.join(different)}" if different else ""
