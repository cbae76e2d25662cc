"""The rule that judges a claim: estimates with intervals against the bounds of the claim."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MIN_N = 2


class Verdict(StrEnum):
    """The verdict on a claim."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    NOT_TESTABLE = "not testable at this scale"


RULE = (
    "Reproduced: the interval of every estimate lies within the bounds of the claim. Not reproduced: some interval"
    " lies outside the bounds. Not testable at this scale: all other cases. Those are no measurement, a single run, or"
    " an interval that crosses a bound. A setting other than the claim's is not testable either, whatever its numbers."
)


@dataclass(frozen=True)
class Estimate:
    """A measured number with its interval, and the bounds of the claim for it."""

    at: str  # what it is of: a width, a batch and prompt, or a corpus
    value: float
    low: float  # NaN if n is too small for an interval
    high: float
    n: int
    least: float = -math.inf
    most: float = math.inf

    @property
    def has_interval(self) -> bool:
        return self.n >= MIN_N and not math.isnan(self.low) and not math.isnan(self.high)

    @property
    def holds(self) -> bool:
        return self.has_interval and self.least <= self.low and self.high <= self.most

    @property
    def fails(self) -> bool:
        return self.has_interval and (self.high < self.least or self.low > self.most)

    @property
    def excess(self) -> float:
        """How far the value lies outside its nearer bound, relative to that bound; negative inside."""
        beyond = ((self.least - self.value, self.least), (self.value - self.most, self.most))
        finite = (distance / (abs(bound) or 1.0) for distance, bound in beyond if math.isfinite(bound))
        return max(finite, default=-math.inf)


def judge(estimates: Sequence[Estimate], *, unlike: str = "", missing: str = "") -> tuple[Verdict, str]:
    """Return the verdict on a claim and its reason.

    Args:
        unlike: how the setting differs from that of the claim; empty if it does not.
        missing: what the claim covers and nobody measured; empty if nothing is missing.
    """
    if unlike:
        return Verdict.NOT_TESTABLE, unlike
    if failing := [e for e in estimates if e.fails]:
        return Verdict.NOT_REPRODUCED, f"outside the bounds at {', '.join(e.at for e in failing)}"
    if missing or not estimates:
        return Verdict.NOT_TESTABLE, missing or "nothing was measured"
    if single := [e for e in estimates if not e.has_interval]:
        return Verdict.NOT_TESTABLE, f"no interval (n < {MIN_N}, or a value that is not finite) at {_listed(single)}"
    if undecided := [e for e in estimates if not e.holds]:
        return Verdict.NOT_TESTABLE, f"the interval crosses a bound at {_listed(undecided)}"
    return Verdict.REPRODUCED, "every interval lies within the bounds"


def decisive(estimates: Sequence[Estimate]) -> Estimate | None:
    """Return the estimate that lies farthest outside its bounds, or nearest to them if all lie inside."""
    known = [e for e in estimates if not math.isnan(e.value)]
    return max(known, key=lambda e: e.excess) if known else None


def _listed(estimates: Sequence[Estimate]) -> str:
    return ", ".join(e.at for e in estimates)
