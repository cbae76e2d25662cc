"""Each claim's measurement against numbers worked out by hand, and each verdict reached for its reason alone."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic
import synthetic_bench
from places import ROOT

from tapernorm_lab.cli.main import main
from tapernorm_lab.config import published
from tapernorm_lab.config.jobs import ClaimsJob
from tapernorm_lab.report import claims
from tapernorm_lab.report.frames import decoding as decode_rows
from tapernorm_lab.report.frames import pretraining as rows
from tapernorm_lab.report.verdicts import Verdict

JOB = ClaimsJob(run="r", caption="c", text="tinystories")
SHAPE = published.TABLE1_SHAPE
VARIANTS = ("baseline", "internal", "internal_aux", "all", "all_aux")
T5 = 2.570581835636314  # 97.5 % quantile of Student's t with 5 degrees of freedom
T2 = 4.302652729911275


def results(losses, *, radial=None, seeds=6, widths=(64, 128, 256, 512), **columns):
    """A results frame: `losses` maps a variant to its loss relative to Baseline, seeds 1 % apart."""
    radial = radial or {}
    rows = [
        {
            "variant": variant,
            "d_model": d,
            "seed": seed,
            "valid_ce": 1.5 * (1 + 0.01 * seed) * (1 + gap / 100) * (1 + 1e-5 * seed * (variant != "baseline")),
            "radial_share": radial.get(variant, math.nan) * (1 + 0.01 * seed),
            **{f"valid_ce_{form}": math.nan for form in ("gated", "unfused", "fused")},
            **SHAPE,
            **columns,
        }
        for variant, gap in losses.items()
        for d in widths
        for seed in range(seeds)
    ]
    return pd.DataFrame(rows)


def curves(late, *, metric, steps=100, d=48):
    """Curves whose `metric` is 1 up to the last tenth and there what `late` (variant -> values by seed) says."""
    rows = [
        {"variant": variant, "d_model": d, "seed": seed, "step": step, metric: value if step >= 0.9 * steps else 1.0}
        for variant, values in late.items()
        for seed, value in enumerate(values)
        for step in range(steps)
    ]
    return pd.DataFrame(rows)


def blank():
    return curves({"baseline": [1.0]}, metric="logit_rms").assign(grad_norm=1.0)


def judged(name, **measured):
    known = {"results": results({"baseline": 0}, seeds=1), "curves": blank(), "text": "tinystories", **measured}
    claim = next(c for c in claims.CLAIMS if c.name == name)
    return claims.claim_row(claim, claims.Measured(**known), run="r")


def verdict(name, **measured):
    return judged(name, **measured)["verdict"]


LOSS = "Loss of Internal-Taper (+aux)"


def test_a_gap_within_the_published_range_at_all_four_sizes_is_reproduced():
    row = judged(LOSS, results=results({"baseline": 0, "internal_aux": 1.1}))
    assert row["verdict"] == Verdict.REPRODUCED
    gaps = [100 * ((1 + 1.1 / 100) * (1 + 1e-5 * seed) - 1) for seed in range(6)]
    mean, half = np.mean(gaps), T5 * np.std(gaps, ddof=1) / math.sqrt(6)
    assert (row["value"], row["low"], row["high"]) == pytest.approx((mean, mean - half, mean + half), rel=1e-9)
    assert (row["n"], row["least"], row["most"]) == ("6", 0.7, 1.5)


@pytest.mark.parametrize("gap", [2.0, 0.1, -1.0])
def test_a_gap_outside_the_range_is_not_reproduced(gap):
    assert verdict(LOSS, results=results({"baseline": 0, "internal_aux": gap})) == Verdict.NOT_REPRODUCED


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"results": results({"baseline": 0, "internal_aux": 1.1}, seeds=1)}, "no interval (n < 2"),
        ({"results": results({"baseline": 0, "internal_aux": 1.1}, widths=(64, 128))}, "d 256, 512 did not run"),
        ({"results": results({"baseline": 0, "internal_aux": 1.1}, context=64)}, "context 64 instead of 512"),
        ({"results": results({"baseline": 0, "internal_aux": 1.1}), "text": "web"}, "text web instead of tinystories"),
        ({"results": results({"baseline": 0})}, "nothing was measured"),
        ({"results": results({"internal_aux": 1.1})}, "nothing was measured"),
        ({"results": results({"baseline": 0, "internal_aux": 1.4975})}, "crosses a bound"),
    ],
)
def test_a_gap_that_does_not_settle_it_or_is_of_other_runs_is_not_testable(changes, reason):
    row = judged(LOSS, **changes)
    assert row["verdict"] == Verdict.NOT_TESTABLE
    assert reason in row["reason"]


def test_the_radial_gradient_must_vanish_with_a_final_norm_and_not_without():
    name, all_variants = "No radial gradient", dict.fromkeys(VARIANTS, 0)
    true = {"baseline": 1e-7, "internal": 3e-7, "internal_aux": 2e-7, "all": 0.2, "all_aux": 0.1}
    row = judged(name, results=results(all_variants, radial=true, widths=(64,)))
    assert row["verdict"] == Verdict.REPRODUCED
    largest, smallest = row["estimates"]
    assert largest.value == pytest.approx(3e-7 * 1.025)  # of the variants with a norm the largest
    assert smallest.value == pytest.approx(0.1 * 1.025)  # of those without the smallest
    for wrong in ({"internal": 0.01}, {"all_aux": 1e-6}):
        frame = results(all_variants, radial=true | wrong, widths=(64,))
        assert verdict(name, results=frame) == Verdict.NOT_REPRODUCED
    only = judged(name, results=results({"baseline": 0}, radial=true, widths=(64,)))
    assert (only["verdict"], only["reason"]) == (Verdict.NOT_TESTABLE, "d 64 ran nothing without a final norm")
    assert verdict(name, results=results(all_variants, radial=true, seeds=1)) == Verdict.NOT_TESTABLE
    assert verdict(name, results=results(all_variants)) == Verdict.NOT_TESTABLE  # never measured


def test_logits_are_compared_seed_by_seed_over_the_end_of_training():
    late = {"all": [6.0, 9.0, 13.0], "baseline": [4.0, 6.0, 8.0], "all_aux": [5.0, 7.0, 10.0]}
    row = judged("Logits grow", curves=curves(late, metric="logit_rms"))
    logs = np.log([1.5, 1.5, 13 / 8])
    half = T2 * np.std(logs, ddof=1) / math.sqrt(3)
    to_baseline = row["estimates"][0]
    assert to_baseline.value == pytest.approx(math.exp(logs.mean()))
    assert to_baseline.low == pytest.approx(math.exp(logs.mean() - half))
    assert row["verdict"] == Verdict.REPRODUCED
    swapped = {"all": late["baseline"], "baseline": late["all"], "all_aux": late["all_aux"]}
    assert verdict("Logits grow", curves=curves(swapped, metric="logit_rms")) == Verdict.NOT_REPRODUCED
    with_norm = curves(late | {"internal": [7.0, 10.0, 14.0]}, metric="logit_rms")  # has a final norm, and outgrows it
    assert verdict("Logits grow", curves=with_norm) == Verdict.NOT_REPRODUCED
    for less in ({v: x[:1] for v, x in late.items()}, {"all": late["all"]}):
        assert verdict("Logits grow", curves=curves(less, metric="logit_rms")) == Verdict.NOT_TESTABLE


GRADIENTS = {
    "baseline": [1.0, 1.1, 0.9],
    "internal": [1.2, 1.3, 1.1],
    "internal_aux": [1.1, 1.2, 1.0],
    "all": [3.0, 3.2, 2.9],
    "all_aux": [1.5, 1.6, 1.45],
}


def test_gradients_cluster_where_all_taper_is_farther_off_than_the_others_are_apart():
    row = judged("Gradients cluster", curves=curves(GRADIENTS, metric="grad_norm"))
    logs = np.log([GRADIENTS[v] for v in ("baseline", "internal", "internal_aux")])
    margins = np.abs(np.log(GRADIENTS["all"]) - logs.mean(axis=0)) - (logs.max(axis=0) - logs.min(axis=0))
    assert row["value"] == pytest.approx(margins.mean())
    assert row["verdict"] == Verdict.REPRODUCED
    mixed = GRADIENTS | {"all": [1.15, 1.25, 1.05]}
    assert verdict("Gradients cluster", curves=curves(mixed, metric="grad_norm")) == Verdict.NOT_REPRODUCED
    without = {v: x for v, x in GRADIENTS.items() if v != "internal"}
    assert verdict("Gradients cluster", curves=curves(without, metric="grad_norm")) == Verdict.NOT_TESTABLE


def test_the_scale_loss_must_bring_gradients_nearer_to_the_normed_ones():
    name = "The scale loss restores gradients"
    row = judged(name, curves=curves(GRADIENTS, metric="grad_norm"))
    centre = np.log([GRADIENTS[v] for v in ("baseline", "internal", "internal_aux")]).mean(axis=0)
    back = np.abs(np.log(GRADIENTS["all"]) - centre) / 2 - np.abs(np.log(GRADIENTS["all_aux"]) - centre)
    assert row["value"] == pytest.approx(back.mean())
    assert row["verdict"] == Verdict.REPRODUCED
    hardly = GRADIENTS | {"all_aux": [2.6, 2.8, 2.5]}  # nearer, and not back
    assert verdict(name, curves=curves(hardly, metric="grad_norm")) == Verdict.NOT_REPRODUCED
    swapped = GRADIENTS | {"all": GRADIENTS["all_aux"], "all_aux": GRADIENTS["all"]}
    assert verdict(name, curves=curves(swapped, metric="grad_norm")) == Verdict.NOT_REPRODUCED


@pytest.mark.parametrize("name", ["Logits grow", "Gradients cluster", "The scale loss restores gradients"])
def test_what_a_figure_shows_of_the_papers_runs_is_not_judged_by_others(name):
    seen = pd.concat([curves(GRADIENTS, metric=metric) for metric in ("grad_norm", "logit_rms")])
    assert verdict(name, curves=seen) == Verdict.REPRODUCED
    row = judged(name, curves=seen, text="web")
    assert (row["verdict"], row["estimates"] != []) == (Verdict.NOT_TESTABLE, True)
    assert "text web instead of tinystories" in row["reason"]


def test_folding_is_judged_by_the_model_that_it_moved_most():
    frame = results({"baseline": 0, "all": 0}, seeds=2, widths=(64,))
    tapered = frame["variant"] == "all"
    frame.loc[tapered, ["valid_ce_gated", "valid_ce_unfused"]] = 2.0
    frame.loc[tapered, "valid_ce_fused"] = [2.0 - 3e-7, 2.0 + 1e-7]
    row = judged("Folding changes nothing", results=frame)
    assert row["verdict"] == Verdict.REPRODUCED
    assert row["value"] == pytest.approx(3e-7)
    gpt2 = [{"n_folded": 1, "folded_minus_gated": -2e-3}, {"n_folded": 1, "folded_minus_gated": 1e-6}]
    assert verdict("Folding changes nothing", results=frame, gpt2=gpt2) == Verdict.NOT_REPRODUCED  # one of two models
    frame.loc[tapered, "valid_ce_fused"] = [2.1, 2.2]
    assert verdict("Folding changes nothing", results=frame) == Verdict.NOT_REPRODUCED


@pytest.fixture
def bench(tmp_path: Path):
    return decode_rows.read(synthetic_bench.write(synthetic_bench.decode(), tmp_path / "decode.json"))


def of_the_paper(bench, ratio, half=0.002):
    """The same benchmark as if it were of the paper's setting, with every ratio so."""
    key = claims.evidence.NAIVE
    rows = [{**row, key: ratio, f"{key}_low": ratio - half, f"{key}_high": ratio + half} for row in bench.rows]
    return replace(bench, rows=rows, facts={**bench.facts, "device": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16"})


def test_decoding_speed_is_judged_only_in_the_papers_setting(bench):
    name = "Decoding speed, fused"
    row = judged(name, decode=bench)
    assert row["verdict"] == Verdict.NOT_TESTABLE
    assert "dtype float32 instead of bfloat16, device cpu instead of H100" in row["reason"]
    assert len(row["estimates"]) == 6  # every batch and prompt is shown all the same
    assert verdict(name, decode=of_the_paper(bench, 1.16)) == Verdict.REPRODUCED
    assert verdict(name, decode=of_the_paper(bench, 1.30)) == Verdict.NOT_REPRODUCED
    assert verdict(name, decode=of_the_paper(bench, 1.18)) == Verdict.NOT_TESTABLE
    assert judged(name)["reason"] == "no benchmark was given"


def gpt2_row(size, column, gap, n=3, **changes):
    label = {"owt": "OpenWebText", "pile": "The Pile", "pile_filtered": "The Pile, filtered"}[column]
    row = {"size": size, "method": "all_aux", "column": column, "label": label, "vocab_size": 50_257, "context": 1024}
    return (
        row | {"gap_percent": gap, "gap_low": gap - 0.1, "gap_high": gap + 0.1, "n_pairs": n, "n_folded": 0} | changes
    )


def test_gpt2_losses_may_exceed_vanillas_by_as_much_as_fakelns_did():
    name, sizes = "GPT-2 loss of All-TaperLN (+aux)", ("small", "medium", "large", "xl")
    small = published.TABLE3["small"]
    most = 100 * (small["fakeln"].owt / small["vanilla"].owt - 1)  # the largest of the four sizes: 2.23 %
    row = judged(name, gpt2=[gpt2_row(size, "owt", 0.9) for size in sizes])
    assert row["verdict"] == Verdict.REPRODUCED
    assert row["most"] == pytest.approx(most)
    assert verdict(name, gpt2=[gpt2_row(size, "owt", -0.5) for size in sizes]) == Verdict.REPRODUCED  # better yet
    above = [gpt2_row(size, "owt", 3.0) for size in sizes]
    assert verdict(name, gpt2=above) == Verdict.NOT_REPRODUCED
    assert "xl did not run" in judged(name, gpt2=[gpt2_row(size, "owt", 0.9) for size in sizes[:3]])["reason"]
    single = [gpt2_row(size, "owt", 0.9, n=1) for size in sizes]
    assert verdict(name, gpt2=single) == Verdict.NOT_TESTABLE
    stand_in = [gpt2_row(size, "owt", 0.9, label="Bible") for size in sizes]
    assert "Bible for OpenWebText" in judged(name, gpt2=stand_in)["reason"]
    small_vocabulary = [gpt2_row(size, "owt", 0.9, vocab_size=512, context=64) for size in sizes]
    assert "a vocabulary of 512 in rows of 64" in judged(name, gpt2=small_vocabulary)["reason"]


def test_the_table_holds_every_claim_with_its_verdict_and_reason():
    nothing = claims.claims_table({"training": (results({"baseline": 0}, seeds=1), blank())}, JOB)
    assert {record["verdict"] for record in nothing.records} == {Verdict.NOT_TESTABLE}
    assert nothing.caption.startswith("Claims of the paper: 0 reproduced; 0 not reproduced; 12 not testable")
    made = claims.claims_table(
        {"training": (results({"baseline": 0, "internal_aux": 1.1, "all_aux": 2.5}), blank())}, JOB
    )
    assert [row["name"] for row in made.records] == [claim.name for claim in claims.CLAIMS]
    assert [row["verdict"] for row in made.records[:2]] == [Verdict.REPRODUCED, Verdict.NOT_REPRODUCED]
    for line, row in zip(made.rows, made.records, strict=True):
        assert line == [f"{row['name']} ({row['place']})", row["verdict"], row["statement"], *line[3:5], row["reason"]]
        assert row["reason"]


def test_the_verb_judges_the_rows_of_a_run_and_refuses_those_of_another(tmp_path, capsys):
    paths = synthetic.write_run(tmp_path / "results", VARIANTS, (24,), (1, 2, 3))
    rows.write(*rows.collect(paths, run="test"), tmp_path / "rows")
    arguments = ["--results", str(tmp_path), "--out", str(tmp_path / "out")]
    synthetic_bench.write(synthetic_bench.decode(), tmp_path / "bench/decode.json")
    assert main(["table", "claims", "--config", str(ROOT / "config/test.yaml"), *arguments]) == 0
    names = {path.name for path in (tmp_path / "out").glob("[!.]*")}
    assert names == {"claims.csv", "claims.md", "claims.tex", "claims.html"}
    with open(tmp_path / "out/claims.csv", encoding="utf-8", newline="") as file:
        written = {row["name"]: row for row in csv.DictReader(file)}
    verdicts = {name: row["verdict"] for name, row in written.items()}
    assert float(written["Logits grow"]["low"]) > 1  # the made-up All-Taper's grow fourfold, in runs unlike the paper's
    assert verdicts["Logits grow"] == Verdict.NOT_TESTABLE
    assert verdicts["No radial gradient"] == Verdict.REPRODUCED
    assert verdicts[LOSS] == Verdict.NOT_TESTABLE
    assert main(["table", "claims", "--config", str(ROOT / "config/demo.yaml"), *arguments]) == 2
    assert "of run test, not 'demo'" in capsys.readouterr().err
