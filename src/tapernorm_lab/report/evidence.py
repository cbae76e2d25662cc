"""From the rows of a run to the estimates that claims are judged by."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ..config import published
from ..config.variants import PAPER_VARIANTS
from .engine import statistics as stats
from .frames.decoding import Bench
from .frames.gpt2_summary import published_gap
from .tables.table2_decoding import NAIVE
from .verdicts import Estimate

NORMED = tuple(variant.name for variant in PAPER_VARIANTS if not variant.final)  # they keep the final norm
NORMLESS = tuple(variant.name for variant in PAPER_VARIANTS if variant.final)
LATE = 0.1  # of the logged steps: the end of training, where the gate is nearly shut

Found = tuple[list[Estimate], str, str]  # estimates, how the setting is unlike the claim's, what is missing


def over_seeds(at: str, values: ArrayLike, least: float = -math.inf, most: float = math.inf) -> Estimate:
    """Mean and 95 % t interval of one value per seed."""
    x = np.asarray(values, dtype=np.float64)
    mean, std = stats.mean_std(x)
    half = stats.t_quantile(x.size - 1) * std / math.sqrt(x.size) if x.size > 1 else stats.NAN
    return Estimate(at, mean, mean - half, mean + half, x.size, least, most)


def ratio_over_seeds(at: str, ratios: ArrayLike, least: float = -math.inf, most: float = math.inf) -> Estimate:
    """Geometric mean of one ratio per seed, and the 95 % t interval of its logarithm, back as ratios."""
    logs = over_seeds(at, np.log(np.asarray(ratios, dtype=np.float64)))
    return Estimate(at, math.exp(logs.value), math.exp(logs.low), math.exp(logs.high), logs.n, least, most)


def over_models(at: str, values: ArrayLike, most: float) -> Estimate:
    """The largest value over models: an identity must hold for each of them, so that it has no interval of its own."""
    largest = float(np.max(np.asarray(values, dtype=np.float64)))
    return Estimate(at, largest, largest, largest, np.size(values), most=most)


def by_seed(
    width: pd.DataFrame, variants: Sequence[str], column: str, reduce: Callable[[ArrayLike], Any]
) -> list[float]:
    """`reduce` over some variants, seed by seed: over the variants that ran."""
    some = width[width["variant"].isin(variants)]
    return [float(reduce(group.to_numpy())) for _, group in some.groupby("seed")[column]]


def gaps(results: pd.DataFrame, variant: str, *, least: float, most: float) -> list[Estimate]:
    """Paired relative gap to Baseline in percent, one estimate per width that ran both."""
    estimates = []
    for d, width in results.groupby("d_model"):
        losses = {v: dict(zip(g["seed"], g["valid_ce"], strict=True)) for v, g in width.groupby("variant")}
        if variant in losses and "baseline" in losses:
            gap = stats.paired_gap(losses[variant], losses["baseline"])
            estimates.append(Estimate(f"d {d}", gap.value, gap.low, gap.high, len(gap.seeds), least, most))
    return estimates


def unlike_pretraining(results: pd.DataFrame, text: str) -> str:
    """How runs differ from those of Table 1 in text, shape or batch; empty where they do not."""
    theirs = published.TABLE1_SHAPE
    different = [
        f"{name} {', '.join(map(str, values))} for {theirs[name]}"
        for name in theirs
        if (values := sorted(set(results[name]))) != [theirs[name]]
    ]
    different += [f"text {text} for {published.TABLE1_TEXT}"] if text != published.TABLE1_TEXT else []
    return f"the claim is about other runs: here {', '.join(different)}" if different else ""


def late_logs(curves: pd.DataFrame, metric: str) -> dict[int, dict[str, NDArray[np.float64]]]:
    """Width -> variant -> the mean log of `metric` at the end of training, per seed, over the seeds that all have."""
    found = {}
    for d, width in curves.dropna(subset=[metric]).groupby("d_model"):
        steps = sorted(set(width["step"]))
        late = width[width["step"] >= steps[-max(1, round(LATE * len(steps)))]]
        logs = late.assign(log=np.log(late[metric])).pivot_table(index="seed", columns="variant", values="log")
        found[int(str(d))] = {str(v): logs.dropna()[v].to_numpy() for v in logs.columns}
    return found


def speed(bench: Bench | None, phase: str, arm: str, least: float, most: float) -> Found:
    """Speed relative to the several-op Baseline in eager mode, one estimate per batch and prompt."""
    if bench is None:
        return [], "", "no benchmark was given"
    estimates = [
        Estimate(
            at=f"batch {row['batch']}, prompt {row['prompt']}",
            value=row[NAIVE],
            low=row[f"{NAIVE}_low"],
            high=row[f"{NAIVE}_high"],
            n=row["n"],
            least=least,
            most=most,
        )
        for row in bench.where(phase=phase, mode="eager", arm=arm)
    ]
    facts, theirs = bench.facts, published.TABLE2_MODEL
    different = [f"{name} {facts[name]} for {theirs[name]}" for name in theirs if facts[name] != theirs[name]]
    if published.TABLE2_DEVICE not in facts["device"]:
        different.append(f"device {facts['device']} for an {published.TABLE2_DEVICE}")
    unlike = f"the claim is about another setting: here {', '.join(different)}" if different else ""
    return estimates, unlike, "" if estimates else "eager mode was not measured"


def gpt2_gaps(rows: Sequence[dict[str, Any]] | None, method: str) -> Found:
    """Gap to Vanilla of one method per size and corpus, bounded by the largest that FakeLN was published with."""
    mine = [row for row in rows or () if row["method"] == method and row["column"] in _JUDGED]
    estimates = [
        Estimate(
            at=f"{row['size']}, {row['label']}",
            value=row["gap_percent"],
            low=row["gap_low"],
            high=row["gap_high"],
            n=row["n_pairs"],
            most=max(published_gap(size, "fakeln", row["column"]) for size in published.TABLE3),
        )
        for row in mine
    ]
    absent = [size for size in published.TABLE3 if size not in {row["size"] for row in mine}]
    missing = "no GPT-2 was fine-tuned by it" if not mine else f"{', '.join(absent)} did not run" if absent else ""
    return estimates, _unlike_gpt2(mine), missing


_JUDGED = ("owt", "pile_filtered")  # of the whole Pile, three rows decide the published mean of one size


def _unlike_gpt2(rows: Sequence[dict[str, Any]]) -> str:
    ours = {(row["vocab_size"], row["context"]) for row in rows}
    other = sorted(ours - {(published.TABLE3_VOCABULARY, published.TABLE3_CONTEXT)})
    different = [f"a vocabulary of {vocabulary:,} in rows of {context:,}" for vocabulary, context in other]
    theirs = {row["label"]: published.TABLE3_COLUMNS[row["column"]] for row in rows}
    different += [f"{label} for {name}" for label, name in theirs.items() if not label.startswith(name)]
    sizes = sorted({row["size"] for row in rows} - set(published.TABLE3))
    different += [f"sizes {', '.join(sizes)}"] if sizes else []
    return f"the claim is about other models and texts: here {'; '.join(different)}" if different else ""
