"""A claim is never reproduced by default: each way to fall short of it has its own verdict and reason."""

import math

import pytest

from tapernorm_lab.report.verdicts import (
    Estimate,
    Verdict,
    decisive,
    judge,
)

IN = Estimate("d 64", 1.0, 0.8, 1.2, 6, least=0.7, most=1.5)
CROSSING = Estimate("d 128", 1.4, 1.2, 1.6, 6, least=0.7, most=1.5)
OUT = Estimate("d 256", 2.0, 1.6, 2.4, 6, least=0.7, most=1.5)
BELOW = Estimate("d 512", 0.1, -0.2, 0.6, 6, least=0.7, most=1.5)
SINGLE = Estimate("d 64", 1.0, math.nan, math.nan, 1, least=0.7, most=1.5)


def test_reproduced_needs_every_whole_interval_within_the_bounds():
    assert judge([IN])[0] is Verdict.REPRODUCED
    assert judge([IN, Estimate("edge", 1.0, 0.7, 1.5, 2, least=0.7, most=1.5)])[0] is Verdict.REPRODUCED
    assert judge([IN, CROSSING]) == (Verdict.NOT_TESTABLE, "the interval crosses a bound at d 128")


@pytest.mark.parametrize("outside", [OUT, BELOW])
def test_an_interval_wholly_outside_is_not_reproduced_whatever_the_others_say(outside):
    for others in ([], [IN], [CROSSING], [SINGLE]):
        verdict, reason = judge([*others, outside])
        assert verdict is Verdict.NOT_REPRODUCED
        assert outside.at in reason
    assert judge([outside], missing="d 64 did not run")[0] is Verdict.NOT_REPRODUCED


@pytest.mark.parametrize(
    ("estimates", "reason"),
    [
        ([], "nothing was measured"),
        ([SINGLE], "no interval (n < 2, or a value that is not finite) at d 64"),
        (
            [Estimate("a", 1.0, 0.9, 1.1, 1, least=0.7, most=1.5)],
            "no interval (n < 2, or a value that is not finite) at a",
        ),
        ([Estimate("b", math.nan, math.nan, math.nan, 6)], "no interval (n < 2, or a value that is not finite) at b"),
    ],
)
def test_too_little_is_not_testable_and_says_why(estimates, reason):
    assert judge(estimates) == (Verdict.NOT_TESTABLE, reason)


def test_a_claim_of_another_setting_is_not_tested_even_by_numbers_that_fit_or_fail():
    for estimate in (IN, OUT):
        assert judge([estimate], unlike="another text") == (Verdict.NOT_TESTABLE, "another text")


def test_missing_evidence_keeps_the_rest_from_counting_as_reproduced():
    assert judge([IN], missing="d 512 did not run") == (Verdict.NOT_TESTABLE, "d 512 did not run")


def test_the_decisive_estimate_is_the_one_farthest_out():
    assert decisive([IN, OUT, CROSSING]) is OUT
    assert decisive([IN, CROSSING]) is CROSSING
    tiny, none = (Estimate(at, value, 0, value, 2, most=1e-4) for at, value in (("a", 3e-7), ("b", 0.0)))
    assert decisive([tiny, none]) is tiny
    one_sided = Estimate("c", -0.5, -1, 0, 2, least=0.0)
    assert decisive([IN, one_sided]) is one_sided
    assert decisive([Estimate("d", math.nan, math.nan, math.nan, 0)]) is None
