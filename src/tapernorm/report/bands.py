"""From curves of single seeds to what a figure draws: a median over seeds and the band around it."""

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from ..errors import UserError
from . import stats

GAP = "ce_gap_percent"


def across_seeds(curves: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Median and 2.5-97.5 percentile over seeds of `metric`, each seed smoothed first.

    Takes curves of one variant at one width.

    Returns:
        One row per logged step: step, n (seeds), window (points of the rolling mean), median, low, high
        (NaN with one seed), and raw_median, the median of the unsmoothed curves.

    Raises:
        UserError: the metric was not logged, or not at the same steps by every seed.
    """
    if metric not in curves or not has(curves, metric):
        raise UserError(f"no step of {_job(curves)} logs {metric}: make the rows again from complete runs")
    table = curves.dropna(subset=[metric]).pivot(index="seed", columns="step", values=metric)
    if table.isna().to_numpy().any():
        uneven = table.index[table.isna().any(axis=1)].tolist()
        raise UserError(
            f"the seeds of {_job(curves)} log {metric} at different steps (seeds {uneven} lack some): "
            "run them with the same steps and train.log_every"
        )
    raw = table.to_numpy()
    window = smoothing_window(raw.shape[1])
    median, low, high = stats.band([stats.rolling_mean(curve, window) for curve in raw])
    raw_median, _, _ = stats.band(raw)
    columns = {"n": len(raw), "window": window, "median": median, "low": low, "high": high, "raw_median": raw_median}
    return pd.DataFrame({"step": table.columns, **columns})


def smoothing_window(points: int) -> int:
    """About 2 % of a curve's logged points, odd; fewer than a hundred points are not smoothed."""
    return 2 * (points // 100) + 1


def with_gap(curves: pd.DataFrame) -> pd.DataFrame:
    """Add 100 (ce - ce of Baseline)/(ce of Baseline) of the same seed and step, so the same batch; NaN without one."""
    key = ["d_model", "seed", "step"]
    renamed = where(curves, variant="baseline").rename(columns={"ce": "baseline_ce"})
    baseline = pd.DataFrame(renamed, columns=[*key, "baseline_ce"])
    both = curves.merge(baseline, on=key, how="left", validate="many_to_one")
    both[GAP] = 100 * (both["ce"] - both["baseline_ce"]) / both["baseline_ce"]
    return both.drop(columns="baseline_ce")


def gate(curves: pd.DataFrame) -> pd.DataFrame:
    """The one gate that the tapered variants of a width share: step and gate.

    Raises:
        UserError: they were run on different schedules.
    """
    tapered = curves[curves["variant"] != "baseline"]
    logged = pd.DataFrame(tapered if len(tapered) else curves).dropna(subset=["gate"])
    distinct = logged.drop_duplicates(["step", "gate"]).sort_values("step", ignore_index=True)
    if uneven := [step for step, following in pairwise(distinct["step"].tolist()) if step == following]:
        raise UserError(
            f"the runs at d_model {logged['d_model'].iloc[0]} differ in their gate at step {uneven[0]}: "
            "one figure shows one schedule; run them with the same taper settings"
        )
    return pd.DataFrame(distinct, columns=["step", "gate"])


def where(frame: pd.DataFrame, **equal: Any) -> pd.DataFrame:
    """The rows in which each named column has the given value."""
    for column, value in equal.items():
        frame = frame.loc[np.asarray(frame[column]) == value]
    return frame


def has(curves: pd.DataFrame, metric: str) -> bool:
    """Whether any row holds a value of `metric`."""
    return bool(curves[metric].notna().any())


def _job(curves: pd.DataFrame) -> str:
    return f"{curves['variant'].iloc[0]} at d_model {curves['d_model'].iloc[0]}"
