"""Gate and learning rate against values worked out by hand."""

import math

import pytest

from tapernorm.schedule import GateSchedule, ema_rate_over, gate_at, lr_at

SCHEDULE = GateSchedule(start=4, end=12)


@pytest.mark.parametrize(
    ("step", "g"),
    [
        (0, 1.0),
        (3, 1.0),
        (4, 1.0),  # the first mixing step, still at one
        (5, 0.5 * (1 + math.cos(math.pi / 8))),
        (6, 0.5 + math.sqrt(2) / 4),
        (8, 0.5),
        (10, 0.5 - math.sqrt(2) / 4),
        (12, 0.0),
        (13, 0.0),
        (10**9, 0.0),
    ],
)
def test_the_gate_is_a_half_cosine_between_its_boundaries(step, g):
    assert gate_at(step, SCHEDULE) == pytest.approx(g, abs=1e-15)


def test_a_window_of_one_step_goes_from_one_to_zero():
    assert [gate_at(k, GateSchedule(1, 2)) for k in range(3)] == [1.0, 1.0, 0.0]


def test_fractions_become_steps():
    assert GateSchedule.from_fractions(100_000, 0.05, 1.0) == GateSchedule(5000, 100_000)
    assert GateSchedule.from_fractions(300, 0.05, 0.5) == GateSchedule(15, 150)


@pytest.mark.parametrize(("steps", "start", "end"), [(8, 0.05, 1.0), (10, 0.3, 0.32)])
def test_fractions_that_round_to_an_impossible_window_are_refused(steps, start, end):
    with pytest.raises(ValueError, match=r"steps, .*start_fraction .*end_fraction"):
        GateSchedule.from_fractions(steps, start, end)


@pytest.mark.parametrize(
    ("step", "lr"),
    [
        (0, 0.5),
        (1, 1.0),
        (3, 2.0),  # the end of warm-up: the peak
        (4, 2.0),
        (8, 1 + math.sqrt(2) / 2),
        (12, 1.0),
        (16, 1 - math.sqrt(2) / 2),
        (19, 1 + math.cos(math.pi * 15 / 16)),
        (20, 0.0),
    ],
)
def test_the_learning_rate_rises_to_its_peak_and_falls_to_zero_at_the_end(step, lr):
    assert lr_at(step, steps=20, peak=2.0, warmup=4) == pytest.approx(lr, abs=1e-15)


@pytest.mark.parametrize(
    ("start", "horizon", "rate"),
    [
        *[(5_000, 0.02, 0.01), (10_000, 0.02, 0.005), (15_000, 0.02, 1 / 300)],  # the paper's lengths
        *[(100, 0.02, 0.5), (99, 0.02, 0.5), (1, 0.02, 0.5), (101, 0.02, 1 / 2.02)],  # at least two steps
        *[(60, 0.1, 1 / 6), (60, 1.0, 1 / 60)],
    ],
)
def test_running_means_reach_back_over_a_fraction_of_the_warm_up(start, horizon, rate):
    assert ema_rate_over(start, horizon) == pytest.approx(rate, rel=1e-12)


def test_the_default_horizon_gives_the_paper_its_rate():
    assert [round(ema_rate_over(start), 4) for start in (5_000, 10_000, 15_000)] == [0.01, 0.005, 0.0033]
