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

TABLE2_SOURCE = "Kanavalau, Amo Alonso and Lall, arXiv 2602.10408v2, section 5.2"
TABLE2_SHORT = "Kanavalau et al."
TABLE2_SETTING = "H100 80GB, bf16, PyTorch 2.4.1, 30M model"
TABLE2_RATIO = {  # tokens/s relative to Baseline, decoding with a key-value cache, over the settings of the source
    "unfused": Range(1.10, 1.14),
    "fused": Range(1.15, 1.18),
}


@dataclass(frozen=True)
class LastToken:
    """A published row: thousands of tokens/s, without a key-value cache."""

    batch: int
    prompt: int
    baseline: float
    fused: float

    @property
    def ratio(self) -> float:
        return self.fused / self.baseline


TABLE2V1_SOURCE = "Kanavalau, Amo Alonso and Lall, arXiv 2602.10408v1 (the first version), quoted second-hand"
TABLE2V1_SHORT = "Kanavalau et al., v1, second-hand"
TABLE2V1 = (
    LastToken(1, 128, 40.7, 48.7),
    LastToken(1, 256, 79.3, 96.8),
    LastToken(1, 512, 163.2, 195.5),
    LastToken(4, 128, 149.3, 180.4),
    LastToken(4, 256, 290.5, 344.9),
    LastToken(4, 512, 546.3, 615.9),
)
