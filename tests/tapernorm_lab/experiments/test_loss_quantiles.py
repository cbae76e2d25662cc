"""Quantiles of losses against NumPy's in float64, of rounded ones within the stated resolution."""

import math

import builders
import numpy as np
import pytest
import torch

from tapernorm_lab.experiments.loss_quantiles import RESOLUTION, comparable, quantile, rounded

QUANTILES = (0.0, 0.001, 0.25, 0.5, 0.77, 0.999, 1.0)
LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("count", [1, 2, 7, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantiles_of_rounded_losses_are_numpys_within_the_resolution(count, dtype):
    losses = torch.exp(4 * builders.normal(count, seed=count)).to(dtype)  # from about 1e-7 to 1e7
    for q in QUANTILES:
        expected = np.quantile(losses.double().numpy(), q)
        assert quantile(rounded(losses), q) == pytest.approx(expected, rel=1.01 * RESOLUTION)


def test_the_resolution_is_reached_so_a_coarser_claim_would_be_false():
    losses = torch.linspace(1.0, 2.0, 20_001)
    error = (rounded(losses).double() / losses - 1).abs().max()
    assert 0.99 * RESOLUTION < error <= RESOLUTION


def test_a_rounded_loss_is_the_middle_of_its_bucket():
    """Published quantiles are these numbers: 1 + 2^-14 is halfway from 1 to the next bucket, 1 + 2^-13."""
    losses = torch.tensor([1.0, 1 + 2.0**-13 - 2.0**-23, 1 + 2.0**-13, 8.0])
    assert rounded(losses).tolist() == [1 + 2.0**-14, 1 + 2.0**-14, 1 + 3 * 2.0**-14, 8 + 2.0**-11]


def test_zero_of_either_sign_is_the_smallest_loss():
    losses = rounded(torch.tensor([-0.0, 0.0, 3.0, 0.0, -0.0, 5.0]))
    assert quantile(losses, 0.5) == pytest.approx(0.0, abs=1e-38)
    assert quantile(losses, 1.0) == pytest.approx(5.0, rel=RESOLUTION)


@pytest.mark.parametrize("prepare", [rounded, comparable])
@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.nan])
def test_what_is_not_finite_counts_as_larger_than_any_number(prepare, bad):
    losses = prepare(torch.tensor([1.0, bad, 2.0, 3.0, LARGEST]))
    assert quantile(losses, 0.5) == pytest.approx(3.0, rel=RESOLUTION)
    assert quantile(losses, 0.75) == pytest.approx(LARGEST, rel=RESOLUTION)
    assert not math.isfinite(quantile(losses, 0.76))
    assert not math.isfinite(quantile(losses, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 1000, 1001, 3_000_017])
def test_interpolation_between_neighbours_is_numpys_in_float64(count, dtype):
    values = builders.normal(count, seed=2).to(dtype)
    for q in QUANTILES:
        expected = np.quantile(values.double().numpy(), q)
        assert quantile(values.clone(), q) == pytest.approx(expected, rel=1e-13, abs=1e-15)
