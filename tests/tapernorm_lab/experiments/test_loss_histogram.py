"""Quantiles of a histogram against NumPy's over the stored losses, within the stated resolution."""

import math

import builders
import numpy as np
import pytest
import torch

from tapernorm_lab.experiments.loss_histogram import RESOLUTION, LossHistogram, quantile

QUANTILES = (0.0, 0.001, 0.25, 0.5, 0.77, 0.999, 1.0)


def filled(*parts):
    histogram = LossHistogram(torch.device("cpu"))
    for part in parts:
        histogram.add(part)
    return histogram


@pytest.mark.parametrize("count", [1, 2, 7, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantiles_are_numpys_within_the_resolution(count, dtype):
    losses = torch.exp(4 * builders.normal(count, seed=count)).to(dtype)  # from about 1e-7 to 1e7
    histogram = filled(*losses.split(97))
    for q in QUANTILES:
        assert histogram.quantile(q) == pytest.approx(np.quantile(losses.double().numpy(), q), rel=1.01 * RESOLUTION)


def test_the_resolution_is_reached_so_a_coarser_claim_would_be_false():
    losses = torch.linspace(1.0, 2.0, 20_001)
    errors = [abs(filled(one[None]).quantile(0.5) / one.item() - 1) for one in losses[::401]]
    assert 0.9 * RESOLUTION < max(errors) <= RESOLUTION


def test_zero_of_either_sign_is_the_smallest_loss():
    histogram = filled(torch.tensor([[-0.0, 0.0, 3.0], [0.0, -0.0, 5.0]]))
    assert histogram.quantile(0.5) == pytest.approx(0.0, abs=1e-38)
    assert histogram.quantile(1.0) == pytest.approx(5.0, rel=RESOLUTION)


@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.nan])
def test_what_is_not_finite_counts_as_larger_than_any_number(bad):
    losses = torch.tensor([1.0, bad, 2.0, 3.0, torch.finfo(torch.float32).max])
    histogram = filled(losses)
    assert histogram.quantile(0.5) == pytest.approx(3.0, rel=RESOLUTION)
    assert histogram.quantile(0.75) == pytest.approx(torch.finfo(torch.float32).max, rel=RESOLUTION)
    assert math.isnan(histogram.quantile(0.76))
    assert math.isnan(histogram.quantile(1.0))


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1000, 1001])
def test_interpolation_between_neighbours_is_numpys(count):
    values = np.sort(builders.normal(count, seed=2).numpy())
    for q in QUANTILES:
        expected = np.quantile(values, q)
        assert quantile(lambda rank: float(values[rank]), count, q) == pytest.approx(expected, rel=1e-13, abs=1e-15)


def test_a_histogram_is_as_large_however_much_is_added():
    small, large = filled(torch.ones(1)), filled(*[torch.rand(5000) for _ in range(20)])
    sizes = {sum(v.nbytes for v in vars(h).values()) for h in (small, large)}
    assert sizes == {(1 + (0x7F800000 >> 10)) * 8}
