"""The paper's claims, one row each: its statement, our measurement, and a verdict by the rule of `verdicts`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..config import published
from ..config.jobs import ClaimsJob
from ..config.variants import PAPER_VARIANTS, VARIANT_LABELS
from . import evidence
from .frames.decoding import Bench
from .frames.gpt2_summary import table3_rows
from .table import ABSENT, Column, Table
from .verdicts import (
    RULE,
    Estimate,
    Verdict,
    decisive,
    judge,
)

Row = dict[str, Any]

ANCHORED = tuple(v.name for v in PAPER_VARIANTS if v.anchored or not v.final)  # by the final norm or by the scale loss
FOLD_TOLERANCE = 1e-4  # nats/token: a hundredth of the smallest gap that the paper reports of a loss near 1.5
RADIAL_WITH, RADIAL_WITHOUT = 1e-4, 1e-2  # |cos| between gradient and stream; a random direction has about d^-1/2


@dataclass(frozen=True)
class Measured:
    """All that a run may have measured; None is what it did not."""

    results: pd.DataFrame
    curves: pd.DataFrame
    text: str  # source of the pre-training text
    decode: Bench | None = None
    last_token: Bench | None = None
    gpt2: Sequence[Row] | None = None  # rows of Table 3


def measured_of(found: Mapping[str, Any], job: ClaimsJob) -> Measured:
    """What was measured, from the rows of each source."""
    (results, curves), gpt2 = found["training"], found.get("gpt2")
    return Measured(
        results=results,
        curves=curves,
        text=job.text,
        decode=found.get("decode"),
        last_token=found.get("last_token"),
        gpt2=gpt2 and table3_rows(gpt2.scores, run=job.run),
    )


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, in our words, and how it is measured.

    Attributes:
        measure: the estimates, each with its bounds; then how the setting is unlike the claim's, and what is missing,
            both empty where nothing is.
        quantity: what the estimates are, and over what n counts.
    """

    name: str
    place: str  # in the paper
    statement: str
    quantity: str
    measure: Callable[[Measured], tuple[list[Estimate], str, str]]
    digits: str = ".2f"


def claims_table(found: Mapping[str, Any], job: ClaimsJob) -> Table:
    """Every claim with its verdict, as a table, of the rows of each source that was measured."""
    measured = measured_of(found, job)
    rows = [claim_row(claim, measured, run=job.run) for claim in CLAIMS]
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in Verdict}
    return Table(
        name="claims",
        columns=[
            *(Column(header, align="l") for header in ("claim", "verdict", "the paper says", "measured here")),
            Column("n"),
            Column("because", align="l"),
        ],
        rows=[
            [
                f"{row['name']} ({row['place']})",
                *(row[key] for key in ("verdict", "statement", "measurement", "n", "reason")),
            ]
            for row in rows
        ],
        published=[],
        caption=(
            f"Claims of the paper: {'; '.join(f'{n} {v}' for v, n in counts.items())}. Run {job.run}: {job.caption}"
        ),
        notes=[
            RULE,
            "In brackets: 95 % t intervals over paired seeds; of decoding, 95 % bootstrap intervals over rounds."
            " Folding is judged by the model that it moved most.",
            *(f"{row['name']}: {row['quantity']}." for row in rows),
            f"Statements are ours, of what {published.TABLE1_SHORT} (arXiv 2602.10408v2) say. Those about any"
            " model, Prop. 4.1 and folding, are judged at any scale, for that scale alone; the others at theirs only.",
        ],
        records=[{key: value for key, value in row.items() if key != "estimates"} for row in rows],
    )


def claim_row(claim: Claim, measured: Measured, *, run: str) -> Row:
    """One claim: its verdict, the estimate that decides it, and all of them in words."""
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


def _gaps(variant: str) -> Callable[[Measured], tuple[list[Estimate], str, str]]:
    """Table 1: relative gap to Baseline per width, against the published range."""
    theirs = published.TABLE1_GAP_PERCENT[variant]

    def measure(measured: Measured) -> tuple[list[Estimate], str, str]:
        estimates = evidence.gaps(measured.results, variant, least=theirs.low, most=theirs.high)
        widths = {int(d) for d in measured.results["d_model"]}
        absent = [str(d) for d in published.PRETRAIN_HOURS_H100 if d not in widths]
        return estimates, evidence.unlike_pretraining(measured.results, measured.text), _did_not_run(absent)

    return measure


def _did_not_run(widths: Sequence[str]) -> str:
    return f"d {', '.join(widths)} did not run" if widths else ""


def _radial(measured: Measured) -> tuple[list[Estimate], str, str]:
    """Per width, each seed's largest share of the variants with a final norm, and the smallest of those without."""
    estimates, missing = [], []
    for d, width in measured.results.groupby("d_model"):
        normed = evidence.by_seed(width, evidence.NORMED, "radial_share", np.max)
        normless = evidence.by_seed(width, evidence.NORMLESS, "radial_share", np.min)
        if len(normed) and len(normless):
            estimates.append(evidence.over_seeds(f"with, d {d}", normed, most=RADIAL_WITH))
            estimates.append(evidence.over_seeds(f"without, d {d}", normless, least=RADIAL_WITHOUT))
        else:
            missing.append(f"d {d} ran nothing {'without' if len(normed) else 'with'} a final norm")
    return estimates, "", "; ".join(missing)


def _logits(measured: Measured) -> tuple[list[Estimate], str, str]:
    """Logit RMS of the model without any anchor, relative to each of those with the norm or the loss as one."""
    estimates = []
    for d, late in evidence.late_logs(measured.curves, "logit_rms").items():
        for anchored in [variant for variant in ANCHORED if {"all", variant} <= set(late)]:
            ratio = np.exp(late["all"] - late[anchored])  # seed by seed
            estimates.append(evidence.ratio_over_seeds(f"to {VARIANT_LABELS[anchored]}, d {d}", ratio, least=1.0))
    missing = "" if estimates else "no width ran All-Taper with what it is compared with"
    return estimates, evidence.unlike_pretraining(measured.results, measured.text), missing


def _clusters(measured: Measured) -> tuple[list[Estimate], str, str]:
    """How much farther All-Taper's log gradient norm is from the normed variants than these are apart."""
    estimates = []
    for d, late in evidence.late_logs(measured.curves, "grad_norm").items():
        if {*evidence.NORMED, "all"} <= set(late):
            normed = np.array([late[v] for v in evidence.NORMED])
            distance = np.abs(late["all"] - normed.mean(axis=0)) - np.ptp(normed, axis=0)
            estimates.append(evidence.over_seeds(f"d {d}", distance, least=0.0))
    missing = "" if estimates else "no width ran Baseline, both Internal-Taper and All-Taper"
    return estimates, evidence.unlike_pretraining(measured.results, measured.text), missing


def _brought_back(measured: Measured) -> tuple[list[Estimate], str, str]:
    """By how much the scale loss takes more than half of All-Taper's log distance to the normed variants away."""
    estimates = []
    for d, late in evidence.late_logs(measured.curves, "grad_norm").items():
        normed = [late[v] for v in evidence.NORMED if v in late]
        if normed and {"all", "all_aux"} <= set(late):
            centre = np.mean(normed, axis=0)
            back = np.abs(late["all"] - centre) / 2 - np.abs(late["all_aux"] - centre)
            estimates.append(evidence.over_seeds(f"d {d}", back, least=0.0))
    missing = "" if estimates else "no width ran All-Taper with and without the loss, and a normed variant"
    return estimates, evidence.unlike_pretraining(measured.results, measured.text), missing


def _folding(measured: Measured) -> tuple[list[Estimate], str, str]:
    """By how much folding moved the validation loss, over all models."""
    folded = measured.results.dropna(subset=["valid_ce_gated"])
    estimates = [
        evidence.over_models(form, (folded[f"valid_ce_{form}"] - folded["valid_ce_gated"]).abs(), most=FOLD_TOLERANCE)
        for form in ("unfused", "fused")
        if len(folded)
    ]
    moved = [abs(row["folded_minus_gated"]) for row in measured.gpt2 or () if row["n_folded"]]
    if moved:
        estimates.append(evidence.over_models("GPT-2, fused", moved, most=FOLD_TOLERANCE))
    return estimates, "", ""


def _speed(arm: str) -> Callable[[Measured], tuple[list[Estimate], str, str]]:
    theirs = published.TABLE2_RATIO[arm]

    def measure(measured: Measured) -> tuple[list[Estimate], str, str]:
        return evidence.speed(measured.decode, "decode", arm, theirs.low, theirs.high)

    return measure


def _speed_v1(measured: Measured) -> tuple[list[Estimate], str, str]:
    ratios = [line.ratio for line in published.TABLE2V1]
    return evidence.speed(measured.last_token, "forward", "fused", round(min(ratios), 2), round(max(ratios), 2))


def _gpt2(method: str) -> Callable[[Measured], tuple[list[Estimate], str, str]]:
    def measure(measured: Measured) -> tuple[list[Estimate], str, str]:
        return evidence.gpt2_gaps(measured.gpt2, method)

    return measure


def _claims() -> Iterator[Claim]:
    gap = "gap %: mean over paired seeds of 100 (L − L_Baseline)/L_Baseline of the validation loss, per width"
    for variant, theirs in published.TABLE1_GAP_PERCENT.items():
        yield Claim(
            name=f"Loss of {VARIANT_LABELS[variant]}",
            place="Table 1, section 5.1",
            statement=f"its validation loss lies {theirs.low}–{theirs.high} % above Baseline's at the four sizes",
            quantity=gap,
            measure=_gaps(variant),
        )
    yield Claim(
        name="No radial gradient",
        place="Prop. 4.1",
        statement="a final norm removes the gradient's component along the pre-logit stream; without it there is one",
        quantity=(
            "mean over validation tokens of |<grad_h CE, h>|/(||grad_h CE|| ||h||) of the trained model, in float64; of"
            f" the variants with a final norm the largest, at most {RADIAL_WITH:g} (eps leaves it above zero), of those"
            f" without the smallest, at least {RADIAL_WITHOUT:g}; n: seeds"
        ),
        measure=_radial,
        digits=".1e",
    )
    yield Claim(
        name="Logits grow",
        place="Prop. 4.2, Figure 1(b)",
        statement="with neither final norm nor scale loss, the logits outgrow those of the models that have one",
        quantity=(
            "logit RMS of All-Taper over that of each other variant, geometric means over the last tenth of the logged"
            " steps; above 1; n: paired seeds"
        ),
        measure=_logits,
    )
    yield Claim(
        name="Gradients cluster",
        place="Figure 2, section 5.1",
        statement="gradient norms cluster by whether the final norm is there",
        quantity=(
            "distance of All-Taper's log gradient norm from the mean of the three variants with a final norm, less the"
            " range of these; of means over the last tenth of the logged steps; above 0; n: seeds"
        ),
        measure=_clusters,
    )
    yield Claim(
        name="The scale loss restores gradients",
        place="Prop. 4.3, Figure 2",
        statement="the fixed-target loss brings the gradient norms back to those of the models with a final norm",
        quantity=(
            "half the distance of All-Taper's log gradient norm from the mean of the variants with a final norm, less"
            " that of All-Taper (+aux); over the last tenth of the logged steps; above 0; n: seeds"
        ),
        measure=_brought_back,
    )
    yield Claim(
        name="Folding changes nothing",
        place="folding, section 5.2",
        statement="at g = 0 the norms fold into the linear maps and the model stays the same function",
        quantity=(
            "|change of the mean validation loss| in nats/token, the largest over n models; at most"
            f" {FOLD_TOLERANCE:g}, far above float32 rounding"
        ),
        measure=_folding,
        digits=".1e",
    )
    for arm, theirs in published.TABLE2_RATIO.items():
        yield Claim(
            name=f"Decoding speed, {arm}",
            place="Table 2, section 5.2",
            statement=f"with a key-value cache it decodes {theirs.low:.2f}–{theirs.high:.2f} times as fast as Baseline",
            quantity="tokens/s over Baseline's with the several-op norm, eager, per batch and prompt; n: rounds",
            measure=_speed(arm),
            digits=".3f",
        )
    yield Claim(
        name="Last-token speed, fused",
        place="Table 2 of version 1",
        statement="a forward pass without a cache is 1.13–1.22 times as fast",
        quantity="as for decoding, of one forward pass over the prompt; published second-hand; n: rounds",
        measure=_speed_v1,
        digits=".3f",
    )
    for method, label in (("internal_aux", "Internal-TaperLN"), ("all_aux", "All-TaperLN")):
        yield Claim(
            name=f"GPT-2 loss of {label} (+aux)",
            place="Table 3, section 5.3",
            statement="fine-tuned, its loss exceeds Vanilla's by no more than FakeLN's does",
            quantity=(
                "gap % to Vanilla, per size and corpus; at most the largest that FakeLN was published with there, over"
                " the four sizes; n: paired seeds"
            ),
            measure=_gpt2(method),
        )


CLAIMS: tuple[Claim, ...] = tuple(_claims())
