"""Interleaved timing: arms run in rounds, raw samples are kept, and ratios are paired by round."""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Samples = dict[str, list[float]]  # arm -> seconds per round


@dataclass(frozen=True)
class Interval:
    """A median with a 95 % interval and the number of samples behind it."""

    value: float
    low: float
    high: float
    n: int


def interleave(
    arms: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Time every arm once per round, after `warmup` untimed rounds; the order rotates by one each round.

    An arm must synchronise with its device before it returns. Returns seconds per call.
    """
    samples: Samples = {name: [] for name in arms}
    for index, name in turns(arms, rounds=rounds, warmup=warmup):
        began = clock()
        arms[name]()
        if index >= 0:
            samples[name].append(clock() - began)
    return samples


def turns(names: Iterable[str], *, rounds: int, warmup: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name), each name once per round, in a rotating order; warm-up rounds have negative numbers."""
    order = list(names)
    for index in range(-warmup, rounds):
        shift = index % len(order) if order else 0
        for name in order[shift:] + order[:shift]:
            yield index, name


def paired_speedup(samples: Samples, arm: str, baseline: str, *, resamples: int = 2000, seed: int = 0) -> Interval:
    """Return the speed of `arm` relative to `baseline`: the median over rounds of time(baseline)/time(arm)."""
    ratios = [b / a for a, b in zip(samples[arm], samples[baseline], strict=True)]
    return bootstrap_median(ratios, resamples=resamples, seed=seed)


def bootstrap_median(values: Sequence[float], *, resamples: int = 2000, seed: int = 0) -> Interval:
    """Return the median of `values` with its percentile-bootstrap 95 % interval."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    low, high = medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
    return Interval(statistics.median(values), low, high, len(values))
