"""The claims of the paper, one row each: statement, measurement, and a verdict by the rule of `verdicts`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import published
from ..config.jobs import ClaimsJob
from ..config.variants import VARIANT_LABELS
from . import evidence
from .engine.cells import text
from .engine.frame import Row
from .engine.table_spec import Shown, TableSpec
from .evidence import FOLD_TOLERANCE, RADIAL_WITH, RADIAL_WITHOUT, Measured
from .table import ABSENT, Table
from .verdicts import RULE, Estimate, Verdict, decisive, judge


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, paraphrased, and its measurement.

    Attributes:
        place: table, proposition or section of the paper.
        quantity: the quantity that the estimates measure, and what n counts.
        measure: returns the estimates with their bounds, how the setting differs from the claim's, and what is missing.
        digits: format of the estimates.
    """

    name: str
    place: str
    statement: str
    quantity: str
    measure: evidence.Measure
    digits: str = ".2f"


_GAPS = [
    Claim(
        f"Loss of {VARIANT_LABELS[variant]}",
        "Table 1, section 5.1",
        f"its validation loss lies {theirs.low}–{theirs.high} % above Baseline's at the four sizes",
        "gap %: mean over paired seeds of 100 (L − L_Baseline)/L_Baseline of the validation loss, per width",
        evidence.loss_gaps(variant),
    )
    for variant, theirs in published.TABLE1_GAP_PERCENT.items()
]
_DYNAMICS = [
    Claim(
        "No radial gradient",
        "Prop. 4.1",
        "a final norm removes the component of the gradient along the pre-logit stream; without a final norm it stays",
        "mean over validation tokens of |<grad_h CE, h>|/(||grad_h CE|| ||h||) of the trained model, in float64. With a"
        f" final norm the largest of the variants must be at most {RADIAL_WITH:g} (eps leaves it above zero). Without"
        f" one the smallest must be at least {RADIAL_WITHOUT:g}. n counts seeds",
        evidence.radial_shares,
        digits=".1e",
    ),
    Claim(
        "Logits grow",
        "Prop. 4.2, Figure 1(b)",
        "without final norm and scale loss, the logits grow larger than with either of the two",
        "logit RMS of All-Taper over that of each other variant. Both are geometric means over the last tenth of the"
        " logged steps. The ratio must be above 1. n counts paired seeds",
        evidence.at_the_end(
            "logit_rms", evidence.growth_of_logits, "no width ran All-Taper with what it is compared with"
        ),
    ),
    Claim(
        "Gradients cluster",
        "Figure 2, section 5.1",
        "gradient norms form two clusters: with and without final norm",
        "distance of All-Taper's log gradient norm from the mean of the three variants with a final norm, minus the"
        " range of these three. Each is a mean over the last tenth of the logged steps. The difference must be above 0."
        " n counts seeds",
        evidence.at_the_end(
            "grad_norm", evidence.clustering, "no width ran Baseline, both Internal-Taper and All-Taper"
        ),
    ),
    Claim(
        "The scale loss restores gradients",
        "Prop. 4.3, Figure 2",
        "the fixed-target loss brings the gradient norms back to those of the models with a final norm",
        "half the distance of All-Taper, minus the distance of All-Taper (+aux). A distance is that of the log gradient"
        " norm from its mean over the variants with a final norm. Each is a mean over the last tenth of the logged"
        " steps. The difference must be above 0. n counts seeds",
        evidence.at_the_end(
            "grad_norm", evidence.restoring, "no width ran All-Taper with and without the loss, and a normed variant"
        ),
    ),
    Claim(
        "Folding changes nothing",
        "folding, section 5.2",
        "at g = 0 the norms fold into the linear maps without a change of the model's function",
        "|change of the mean validation loss| in nats/token, the largest over n models. It must be at most"
        f" {FOLD_TOLERANCE:g}, far above float32 rounding",
        evidence.folding,
        digits=".1e",
    ),
]
_V1 = sorted(round(line.ratio, 2) for line in published.TABLE2V1)
_SPEEDS = [
    *(
        Claim(
            f"Decoding speed, {arm}",
            "Table 2, section 5.2",
            f"with a key-value cache it decodes {theirs.low:.2f}–{theirs.high:.2f} times as fast as Baseline",
            "tokens/s over Baseline's with the several-op norm, eager, per batch and prompt. n counts rounds",
            evidence.speed("decode", "decode", arm, theirs.low, theirs.high),
            digits=".3f",
        )
        for arm, theirs in published.TABLE2_RATIO.items()
    ),
    Claim(
        "Last-token speed, fused",
        "Table 2 of version 1",
        "a forward pass without a cache is 1.13–1.22 times as fast",
        "as for decoding, of one forward pass of the prompt. The published ratios are second-hand. n counts rounds",
        evidence.speed("last_token", "forward", "fused", _V1[0], _V1[-1]),
        digits=".3f",
    ),
]
_GPT2 = [
    Claim(
        f"GPT-2 loss of {label} (+aux)",
        "Table 3, section 5.3",
        "after fine-tuning, its loss exceeds Vanilla's by no more than FakeLN's does",
        "gap % to Vanilla, per size and corpus. It must be at most the largest published gap of FakeLN on that corpus,"
        " over the four sizes. n counts paired seeds",
        evidence.gpt2_gaps(method),
    )
    for method, label in (("internal_aux", "Internal-TaperLN"), ("all_aux", "All-TaperLN"))
]
CLAIMS = (*_GAPS, *_DYNAMICS, *_SPEEDS, *_GPT2)


def claims_table(found: Mapping[str, Any], job: ClaimsJob) -> Table:
    """Return the table of all claims with their verdicts. `found` maps each measured source to its rows."""
    measured = Measured.of(found, job)
    rows = [claim_row(claim, measured, run=job.run) for claim in CLAIMS]
    counts = "; ".join(f"{sum(row['verdict'] == verdict for row in rows)} {verdict}" for verdict in Verdict)
    spec = TableSpec(
        "claims",
        f"Claims of the paper: {counts}.",
        columns=[
            Shown("claim", lambda row: f"{row['name']} ({row['place']})", align="l"),
            Shown("verdict", text("verdict"), align="l"),
            Shown("the paper says", text("statement"), align="l"),
            Shown("measured here", text("measurement"), align="l"),
            Shown("n", text("n")),
            Shown("because", text("reason"), align="l"),
        ],
        notes=[
            RULE,
            "In brackets: 95 % t intervals over paired seeds. Those of decoding are 95 % bootstrap intervals over"
            " rounds. Folding is judged by the model whose loss it changed most.",
            *(f"{claim.name}: {claim.quantity}." for claim in CLAIMS),
            f"The statements paraphrase {published.TABLE1_SHORT} (arXiv 2602.10408v2). Prop. 4.1 and folding are claims"
            " about any model. A run judges them for its own scale. The other claims are judged only at the scale of"
            " the paper.",
        ],
    )
    return spec.table([{key: row[key] for key in row if key != "estimates"} for row in rows], job)


def claim_row(claim: Claim, measured: Measured, *, run: str) -> Row:
    """Return the row of one claim: verdict, decisive estimate, and all estimates as text."""
    estimates, unlike, missing = claim.measure(measured)
    verdict, reason = judge(estimates, unlike=unlike, missing=missing)
    worst = decisive(estimates) or Estimate("", math.nan, math.nan, math.nan, 0)
    counts = sorted({e.n for e in estimates})
    return {
        "run": run,
        "name": claim.name,
        "place": claim.place,
        "statement": claim.statement,
        "verdict": str(verdict),
        "reason": reason,
        "measurement": "; ".join(_in_words(e, claim.digits) for e in estimates) or ABSENT,
        "quantity": claim.quantity,
        "n": "–".join(map(str, counts[:: max(1, len(counts) - 1)])) or "0",
        "decisive_at": worst.at,
        **{key: getattr(worst, key) for key in ("value", "low", "high")},
        **{key: bound if math.isfinite(bound := getattr(worst, key)) else math.nan for key in ("least", "most")},
        "estimates": estimates,
    }


def _in_words(e: Estimate, digits: str) -> str:
    interval = f" [{e.low:{digits}}, {e.high:{digits}}]" if e.has_interval and e.low < e.high else ""
    return f"{e.at}: " + (ABSENT if math.isnan(e.value) else f"{e.value:{digits}}{interval}".replace("-", "−"))
