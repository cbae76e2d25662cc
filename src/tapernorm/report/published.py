"""Numbers published by others, printed beside ours as theirs. Nothing here was measured by this project."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """A published range, and what its source says about it."""

    low: float
    high: float
    note: str = ""


TABLE1_SOURCE = "Kanavalau, Amo Alonso and Lall, arXiv 2602.10408v2, section 5.1"
TABLE1_SHORT = "Kanavalau et al."
TABLE1_SEEDS = 6
TABLE1_GAP_PERCENT = {  # relative validation-loss gap against Baseline, over the four sizes
    "internal_aux": Range(0.7, 1.5),
    "all_aux": Range(0.8, 1.8, note="9M: one of six seeds excluded as an outlier"),
}
