"""The data of curves: median over seeds, its band, and gaps paired by seed."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from tapernorm.util.errors import UserError

from ..engine import statistics as stats

GAP, GATE = "ce_gap_percent", "gate"


@dataclass(frozen=True)
class Keys:
    """The columns that identify a curve, without its seed, and the reference of the gaps."""

    group: str
    member: str
    reference: str


PRETRAINING = Keys(group="d_model", member="variant", reference="baseline")
FINETUNING = Keys(group="size", member="method", reference="vanilla")


def across_seeds(
    curves: pd.DataFrame, metric: str, *, window: int | None = None, keys: Keys = PRETRAINING
) -> pd.DataFrame:
    """Return median and 2.5-97.5 percentile of `metric` over seeds, with each seed smoothed first.

    Args:
        curves: curves of one member of one group, such as one variant at one width.
        window: points of the rolling mean; None: `smoothing_window`.

    Returns:
        One row per logged step: step, n (seeds), window (points of the rolling mean), median, low, high
        (NaN with one seed), and raw_median, the median of the unsmoothed curves.

    Raises:
        UserError: the metric was not logged, or the seeds logged it at different steps.
    """
    if metric not in curves or not has(curves, metric):
        raise UserError(f"no step of {_job(curves, keys)} logs {metric}: make the rows again from complete runs")
    table = curves.dropna(subset=[metric]).pivot(index="seed", columns="step", values=metric)
    if table.isna().to_numpy().any():
        uneven = table.index[table.isna().any(axis=1)].tolist()
        raise UserError(
            f"the seeds of {_job(curves, keys)} log {metric} at different steps (seeds {uneven} lack some): "
            "run them with the same steps and train.log_every"
        )
    raw = table.to_numpy()
    window = smoothing_window(raw.shape[1]) if window is None else window
    median, low, high = stats.band([stats.rolling_mean(curve, window) for curve in raw])
    raw_median, _, _ = stats.band(raw)
    columns = {"n": len(raw), "window": window, "median": median, "low": low, "high": high, "raw_median": raw_median}
    return pd.DataFrame({"step": table.columns, **columns})


def smoothing_window(points: int) -> int:
    """Return about 2 % of a curve's logged points, odd. Fewer than a hundred points are not smoothed."""
    return 2 * (points // 100) + 1


def with_gap(curves: pd.DataFrame, *, metric: str = "ce", gap: str = GAP, keys: Keys = PRETRAINING) -> pd.DataFrame:
    """Add `gap` = 100 (L - L_ref)/L_ref, with the reference of the same seed and step; NaN without one.

    Training losses of one seed and step are of the same batch.
    """
    key = [keys.group, "seed", "step"]
    renamed = where(curves, **{keys.member: keys.reference}).rename(columns={metric: "reference"})
    reference = pd.DataFrame(renamed, columns=[*key, "reference"])
    both = curves.merge(reference, on=key, how="left", validate="many_to_one")
    both[gap] = 100 * (both[metric] - both["reference"]) / both["reference"]
    return both.drop(columns="reference")


def gate(curves: pd.DataFrame, *, keys: Keys = PRETRAINING) -> pd.DataFrame:
    """Return the gate that all tapered members of a group share: step, and the gate as `median`.

    Raises:
        UserError: their schedules differ.
    """
    tapered = curves[curves[keys.member] != keys.reference]
    logged = pd.DataFrame(tapered if len(tapered) else curves).dropna(subset=[GATE])
    distinct = logged.drop_duplicates(["step", GATE]).sort_values("step", ignore_index=True)
    if uneven := [step for step, following in pairwise(distinct["step"].tolist()) if step == following]:
        raise UserError(
            f"the runs at {keys.group} {logged[keys.group].iloc[0]} differ in their gate at step {uneven[0]}: "
            "one figure shows one schedule; run them with the same taper settings"
        )
    return pd.DataFrame({"step": distinct["step"], "metric": GATE, "median": distinct[GATE]})


def joined(parts: Iterable[pd.DataFrame], keys: Keys = PRETRAINING) -> pd.DataFrame:
    """Join the data of a figure, with the columns group, metric, member and step first."""
    frame = pd.concat([part for part in parts if len(part)], ignore_index=True)
    leading = [keys.group, "metric", keys.member, "step"]
    return pd.DataFrame(frame, columns=[*leading, *(c for c in frame.columns if c not in leading)])


def where(frame: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Return the rows in which each named column has the given value, or one of a list."""
    for column, value in wanted.items():
        frame = frame.loc[np.isin(np.asarray(frame[column]), value)]
    return frame


def has(curves: pd.DataFrame, metric: str) -> bool:
    """Whether any row holds a value of `metric`."""
    return bool(curves[metric].notna().any())


def span(rows: pd.DataFrame, column: str) -> str:
    """Format the smallest and the largest of some integers, or their single value."""
    values = sorted({int(value) for value in rows[column].dropna()})
    return f"{values[0]}" if len(values) == 1 else f"{values[0]}–{values[-1]}"


def seeds(rows: pd.DataFrame, column: str = "n") -> str:
    """Format a number of seeds."""
    return f"{span(rows, column)} seed{'s' if max(rows[column].dropna()) > 1 else ''}"


def _job(curves: pd.DataFrame, keys: Keys) -> str:
    return f"{curves[keys.member].iloc[0]} at {keys.group} {curves[keys.group].iloc[0]}"
