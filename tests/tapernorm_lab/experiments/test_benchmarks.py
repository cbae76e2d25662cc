"""Timing against a clock that the arms themselves move."""

import pytest

from tapernorm_lab.experiments.speed.interleaved_timing import bootstrap_median, interleave, paired_speedup


class Clock:
    """Arms add the seconds they claim to take; a drift makes every later call slower."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        self.drift = drift

    def __call__(self) -> float:
        return self.now

    def arm(self, name: str, seconds: float):
        def run() -> None:
            self.calls.append(name)
            self.now += seconds * (1 + self.drift * len(self.calls))

        return run


def test_every_arm_is_timed_once_a_round_and_the_order_turns() -> None:
    clock = Clock()
    arms = {name: clock.arm(name, seconds) for name, seconds in {"a": 1.0, "b": 2.0, "c": 4.0}.items()}
    samples = interleave(arms, rounds=4, warmup=2, clock=clock)
    assert samples == {"a": [1.0] * 4, "b": [2.0] * 4, "c": [4.0] * 4}
    rounds = ["".join(clock.calls[i : i + 3]) for i in range(0, len(clock.calls), 3)]
    assert rounds == ["bca", "cab", "abc", "bca", "cab", "abc"]  # two of warm-up


def test_the_warm_up_is_not_counted() -> None:
    clock = Clock()
    slow_once = iter([9.0, 1.0, 1.0, 1.0])

    def arm() -> None:
        clock.now += next(slow_once)

    assert interleave({"a": arm}, rounds=3, warmup=1, clock=clock) == {"a": [1.0, 1.0, 1.0]}


def test_a_drifting_machine_does_not_shift_a_paired_ratio() -> None:
    clock = Clock(drift=0.001)
    samples = interleave(
        {"ours": clock.arm("ours", 1.0), "theirs": clock.arm("theirs", 1.1)}, rounds=200, warmup=0, clock=clock
    )
    speedup = paired_speedup(samples, "ours", "theirs")
    assert speedup.value == pytest.approx(1.1, rel=2e-3)
    assert speedup.low <= 1.1 <= speedup.high
    assert samples["ours"][-1] > 1.3 * samples["ours"][0]  # the drift was there


def test_the_speed_up_is_the_baselines_time_over_ours() -> None:
    speedup = paired_speedup({"a": [1.0, 2.0, 4.0], "b": [2.0, 6.0, 16.0]}, "a", "b")
    assert (speedup.value, speedup.n) == (3.0, 3)
    assert paired_speedup({"a": [1.0, 2.0, 4.0], "b": [2.0, 6.0, 16.0]}, "b", "a").value == pytest.approx(1 / 3)


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match=r"zip\(\)"):
        paired_speedup({"a": [1.0, 2.0], "b": [1.0]}, "a", "b")


def test_the_interval_of_two_values_is_known_by_hand() -> None:
    """A resample of (x, y) has the median x, their middle or y, in a quarter, a half and a quarter of all cases."""
    found = bootstrap_median([1.0, 2.0])
    assert (found.value, found.low, found.high, found.n) == (1.5, 1.0, 2.0, 2)


def test_the_interval_leaves_out_what_is_rarer_than_it_covers() -> None:
    """One outlier of nine is the median of a resample where 5 of 9 draws hit it: once in 700, outside 95 %."""
    values = [1.0] * 8 + [100.0]
    assert bootstrap_median(values).high == 1.0
    assert bootstrap_median([1.0] * 5 + [100.0] * 4).high == 100.0


def test_equal_values_have_no_interval_and_a_seed_repeats_it() -> None:
    assert bootstrap_median([3.0] * 5) == bootstrap_median([3.0] * 5, seed=4)
    values = [0.1 * k for k in range(30)]
    assert bootstrap_median(values, seed=1) == bootstrap_median(values, seed=1)
    found = bootstrap_median(values)
    assert found.low < found.value < found.high
