"""Statistics over seeds, against numbers worked out by hand and tabulated quantiles."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from tapernorm_lab.report.engine import statistics as stats
from tapernorm_lab.report.engine.cells import two_digits

BASELINE = {0: 3.0, 1: 2.0, 2: 4.0}
TAPERED = {0: 3.03, 1: 2.04, 2: 4.06}  # 1 %, 2 % and 1.5 % above


def test_gap_is_the_mean_of_the_seeds_own_gaps_with_a_t_interval():
    gap = stats.paired_gap(TAPERED, BASELINE)
    assert gap.value == pytest.approx(1.5, abs=1e-12)
    half = 1.2420688543  # 4.3026527 * 0.5 / sqrt(3)
    assert (gap.low, gap.high) == pytest.approx((1.5 - half, 1.5 + half), abs=1e-8)
    assert gap.seeds == (0, 1, 2)


def test_unpaired_computations_give_another_gap_and_another_interval():
    ratio_of_means = 100 * (sum(TAPERED.values()) / sum(BASELINE.values()) - 1)
    assert ratio_of_means == pytest.approx(1.4444444, abs=1e-6)
    shifted = stats.paired_gap({0: 2.04, 1: 4.06, 2: 3.03}, BASELINE)  # the same losses against the wrong seeds
    right = stats.paired_gap(TAPERED, BASELINE)
    assert abs(shifted.value - right.value) > 10
    assert shifted.high - shifted.low > 100 * (right.high - right.low)


def test_only_seeds_that_both_have_are_paired():
    gap = stats.paired_gap({0: 3.03, 2: 4.06, 7: 9.9}, {**BASELINE, 5: 1.0})
    assert gap.seeds == (0, 2)
    assert gap.value == pytest.approx(1.25, abs=1e-12)
    assert gap.high - gap.value == pytest.approx(12.7062047364 * math.sqrt(0.125) / math.sqrt(2), abs=1e-8)


def test_one_pair_has_a_gap_without_interval_and_no_pair_has_neither():
    one = stats.paired_gap({1: 2.04}, BASELINE)
    assert one.value == pytest.approx(2.0, abs=1e-12)
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    none = stats.paired_gap({9: 2.04}, BASELINE)
    assert none.seeds == ()
    assert math.isnan(none.value)


def test_spread_is_the_sample_standard_deviation():
    assert stats.mean_std([1.0, 2.0, 4.0, 5.0]) == pytest.approx((3.0, math.sqrt(10 / 3)), abs=1e-14)
    mean, std = stats.mean_std([2.5])
    assert mean == 2.5
    assert math.isnan(std)


def test_median_and_range_are_those_of_the_values_in_order():
    assert stats.median_range([7.0, 1.0, 3.0, 48000.0]) == (5.0, 1.0, 48000.0)
    assert all(map(math.isnan, stats.median_range([])))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((48095.56, "48000"), (193.9, "190"), (99.6, "100"), (9.96, "10"), (1.0, "1.0"), (0.4, "0.40")),
        *((0.0996, "0.10"), (-0.0123, "-0.012"), (0.0, "0.0"), (1.26e7, "1.3e+07")),
    ],
)
def test_two_digits_are_significant_and_rounded_once(value, text):
    assert two_digits(value) == text


@pytest.mark.parametrize(
    ("df", "quantile"),  # published tables of Student's t, two-sided 5 %
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365), (10, 2.228), (30, 2.042)],
)
def test_t_quantile_agrees_with_the_tables(df, quantile):
    assert stats.t_quantile(df) == pytest.approx(quantile, abs=5e-4)


def test_t_quantile_in_closed_form_and_in_its_limit():
    assert stats.t_quantile(1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-13)
    assert stats.t_quantile(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-13)
    assert stats.t_quantile(200_001) == pytest.approx(NormalDist().inv_cdf(0.975), abs=2e-5)
    with pytest.raises(ValueError, match="df must be at least 1, got 0"):
        stats.t_quantile(0)


def test_outlier_rule_at_its_boundary():
    losses = {0: 4.0, 1: 5.0, 2: 6.0, 3: 7.0}  # with one more above: median 6, MAD 1
    assert stats.outliers({**losses, 8: 9.0}) == {}
    assert stats.outliers({**losses, 8: math.nextafter(9.0, 10)}) == {8: pytest.approx(3.0)}
    assert stats.outliers({**losses, 8: 100.0}) == {8: 94.0}


def test_outlier_rule_where_the_spread_is_nil():
    assert stats.outliers({}) == {}
    assert stats.outliers({3: 2.0}) == {}
    assert stats.outliers({3: 2.0, 4: 90.0}) == {}  # two seeds lie equally far from their median
    assert stats.outliers({0: 2.0, 1: 2.0, 2: 2.0, 3: 2.1}) == {3: math.inf}


def test_band_is_median_and_interpolated_percentiles_over_seeds():
    curves = [[0.0, 7.0], [1.0, 5.0], [2.0, 6.0], [3.0, 8.0], [10.0, 9.0]]
    median, low, high = stats.band(curves)
    assert median.tolist() == [2.0, 7.0]
    assert low.tolist() == pytest.approx([0.1, 5.1])  # a tenth of the way from the lowest to the next
    assert high.tolist() == pytest.approx([9.3, 8.9])


def test_one_seed_has_no_band():
    median, low, high = stats.band([[1.0, 2.0]])
    assert median.tolist() == [1.0, 2.0]
    assert np.isnan([low, high]).all()


def test_rolling_mean_is_centred_shrinks_at_the_start_and_is_cut_at_the_end():
    x = [8.0, 4.0, 2.0, 1.0, 9.0, 3.0]
    assert stats.rolling_mean(x, 5).tolist() == pytest.approx([8.0, 14 / 3, 24 / 5, 19 / 5, 15 / 4, 13 / 3])
    assert stats.rolling_mean(x, 1).tolist() == x
    with pytest.raises(ValueError, match="odd number of points, got 4"):
        stats.rolling_mean(x, 4)
