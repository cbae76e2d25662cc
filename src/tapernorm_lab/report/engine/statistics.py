"""Statistics over seeds as pure functions: paired gap, outlier rule, percentile band, rolling mean."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t as student_t

NAN = float("nan")
BAND = (2.5, 97.5)  # percentiles over seeds
MAX_MADS = 3.0  # a seed farther than this from the median, in MADs, is an outlier


Measure = Literal["percent", "difference", "ratio"]
MEASURES: dict[Measure, Callable[[float, float], float]] = {
    "percent": lambda loss, other: 100 * (loss - other) / other,
    "difference": lambda loss, other: loss - other,
    "ratio": lambda loss, other: math.log(loss) - math.log(other),  # averaged as logarithms: the geometric mean
}


@dataclass(frozen=True)
class Gap:
    """Mean gap between two losses over paired seeds, with its 95 % t interval; NaN if n is too small."""

    value: float
    low: float
    high: float
    seeds: tuple[Any, ...]  # of the pairs


def paired_gap(losses: Mapping[Any, float], reference: Mapping[Any, float], measure: Measure = "percent") -> Gap:
    """Return the gap over the seeds that both mappings (seed -> loss) have."""
    seeds = tuple(sorted(losses.keys() & reference.keys()))
    gaps = [MEASURES[measure](losses[seed], reference[seed]) for seed in seeds]
    value, low, high = map(math.exp if measure == "ratio" else float, mean_interval(gaps))
    return Gap(value, low, high, seeds)


def mean_interval(values: ArrayLike) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % t interval; NaN if there are too few values."""
    mean, std = mean_std(values)
    n = np.size(values)
    half = t_quantile(n - 1) * std / math.sqrt(n) if n > 1 else NAN
    return mean, mean - half, mean + half


def mean_std(values: ArrayLike) -> tuple[float, float]:
    """Return mean and sample standard deviation (ddof 1); NaN if there are too few values."""
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean()) if x.size else NAN
    return mean, float(x.std(ddof=1)) if x.size > 1 else NAN


def median_range(values: ArrayLike) -> tuple[float, float, float]:
    """Median, smallest and largest value; NaN of no value."""
    x = np.asarray(values, dtype=np.float64)
    return (float(np.median(x)), float(x.min()), float(x.max())) if x.size else (NAN, NAN, NAN)


def outliers(losses: Mapping[int, float], max_mads: float = MAX_MADS) -> dict[int, float]:
    """Return seed -> distance in MADs, for seeds whose loss lies more than `max_mads` MAD from the median.

    MAD is the unscaled median absolute deviation from the median. One or two seeds never have an outlier.
    """
    if not losses:
        return {}
    median = float(np.median(list(losses.values())))
    distance = {seed: abs(loss - median) for seed, loss in losses.items()}
    mad = float(np.median(list(distance.values())))
    return {s: d / mad if mad else math.inf for s, d in sorted(distance.items()) if d > max_mads * mad}


def band(curves: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return median, 2.5 and 97.5 percentile over the first axis of (seeds, points). One seed has no band: NaN."""
    x = np.asarray(curves, dtype=np.float64)
    median = np.median(x, axis=0)
    if len(x) == 1:
        return median, np.full_like(median, NAN), np.full_like(median, NAN)
    low, high = np.percentile(x, BAND, axis=0)
    return median, low, high


def rolling_mean(values: ArrayLike, window: int) -> NDArray[np.float64]:
    """Return the centred mean over an odd `window` of points.

    The window shrinks symmetrically towards the first point, where curves are steep. At the last points, where they are
    flat, it is cut off on the right only.
    """
    if window < 1 or window % 2 == 0:
        raise ValueError(f"window must be an odd number of points, got {window}")
    x = np.asarray(values, dtype=np.float64)
    half = [min(window // 2, i) for i in range(len(x))]
    return np.array([x[i - h : i + h + 1].mean() for i, h in enumerate(half)])


def t_quantile(df: int) -> float:
    """Return the q with P(|T| < q) = 95 % for Student's t with `df` degrees of freedom."""
    if df < 1:
        raise ValueError(f"df must be at least 1, got {df}")
    return float(student_t.ppf(0.975, df))
