"""Benchmark rows from samples whose speeds and ratios are worked out by hand."""

import math

import pandas as pd
import pytest
import synthetic_bench

from tapernorm.util.errors import UserError
from tapernorm_lab.report.frames import decoding as decode_rows
from tapernorm_lab.report.frames.decoding import ARMS, bench_rows

SECONDS = {  # ratios to `baseline`: 0.8, 0.8, 0.5 | 2, 1.25, 1.6 | 4, 2, 2 ...
    "baseline_naive": [5.0, 2.5, 8.0],
    "baseline": [4.0, 2.0, 4.0],
    "unfused": [2.0, 1.6, 2.5],
    "fused": [1.0, 1.0, 2.0],
    "identity": [0.5, 0.5, 0.5],
}


def entries(seconds=SECONDS, **changes):
    where = {"mode": "eager", "batch": 2, "prompt": 16, "phase": "decode", "tokens": 20, "bytes_per_token": 300.0}
    return [{**where, "arm": arm, "seconds": list(times), **changes} for arm, times in seconds.items()]


def by_arm(rows):
    return {row["arm"]: row for row in rows}


def test_speed_is_the_median_over_rounds_and_its_interval_the_range_of_three():
    row = by_arm(bench_rows(entries()))["unfused"]
    assert (row["tokens_per_s"], row["n"], row["tokens"]) == (10.0, 3, 20)
    # a bootstrap median of three samples is the least of them in 7/27 of the draws, and the largest as often
    assert (row["tokens_per_s_low"], row["tokens_per_s_high"]) == (8.0, 12.5)


def test_ratios_are_paired_by_round_to_either_baseline():
    rows = by_arm(bench_rows(entries()))
    named = [(a, b) for a in ("unfused", "fused", "baseline_naive") for b in ("baseline", "baseline_naive")]
    found = {pair: [rows[pair[0]][f"ratio_{pair[1]}{end}"] for end in ("", "_low", "_high")] for pair in named}
    assert found[("unfused", "baseline")] == [1.6, 1.25, 2.0]
    assert found[("unfused", "baseline_naive")] == [2.5, 1.5625, 3.2]
    assert found[("fused", "baseline")] == [2.0, 2.0, 4.0]
    assert found[("fused", "baseline_naive")] == [4.0, 2.5, 5.0]
    assert found[("baseline_naive", "baseline")] == [0.8, 0.5, 0.8]
    assert found[("baseline_naive", "baseline_naive")] == [1.0, 1.0, 1.0]


def test_the_ratio_is_not_that_of_the_medians():
    slow = {arm: [0.5] * 3 for arm in ARMS} | {"baseline": [1.0, 2.0, 9.0], "fused": [1.0, 8.0, 3.0]}
    assert by_arm(bench_rows(entries(slow)))["fused"]["ratio_baseline"] == 1.0  # of 1, 0.25 and 3; medians give 2/3


def test_bytes_per_second_and_their_share_of_the_read_bandwidth():
    row = by_arm(bench_rows(entries(), read_bytes_per_s=12_000.0))["unfused"]
    assert (row["bytes_per_token"], row["bytes_per_s"], row["read_share"]) == (300.0, 3000.0, 0.25)


def test_where_bytes_or_bandwidth_are_unknown_so_is_the_share():
    prefill = bench_rows(entries(phase="prefill", bytes_per_token=None), read_bytes_per_s=12_000.0)
    assert all(
        math.isnan(row[column]) for row in prefill for column in ("bytes_per_token", "bytes_per_s", "read_share")
    )
    assert all(math.isnan(row["read_share"]) and row["bytes_per_s"] > 0 for row in bench_rows(entries()))


def test_one_round_has_no_interval():
    row = by_arm(bench_rows(entries({arm: times[:1] for arm, times in SECONDS.items()})))["fused"]
    assert (row["tokens_per_s"], row["ratio_baseline"], row["n"]) == (20.0, 4.0, 1)
    assert all(
        math.isnan(row[f"{name}_{end}"]) for name in ("tokens_per_s", "ratio_baseline") for end in ("low", "high")
    )


def test_rows_are_in_order_whatever_the_order_of_the_file():
    once = {arm: [1.0] for arm in ARMS}
    cells = [
        cell
        for mode, phase in (("cudagraph", "decode"), ("eager", "prefill"), ("eager", "decode"), ("compile", "decode"))
        for batch in (10, 4)
        for prompt in (512, 64)
        for cell in reversed(entries(once, mode=mode, phase=phase, batch=batch, prompt=prompt))
    ]
    found = [tuple(row[key] for key in ("phase", "mode", "batch", "prompt", "arm")) for row in bench_rows(cells)]
    modes = [("decode", "eager"), ("decode", "compile"), ("decode", "cudagraph"), ("prefill", "eager")]
    assert found == [(*mode, b, p, arm) for mode in modes for b in (4, 10) for p in (64, 512) for arm in ARMS]


def changed(which, **changes):
    return [{**entry, **(changes if entry["arm"] == which else {})} for entry in entries()]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([], "the bench "),
        (changed("fused", seconds=[1.0, 2.0]), r"rounds \(.*fused 2.*\)"),
        (changed("fused", tokens=19), r"tokens \(.*fused 19"),
        (changed("fused", seconds=[1.0, 0.0, 2.0]), r"fused at decode, eager, batch 2, prompt 16 .* 0\.0 s"),
        (changed("fused", seconds=[1.0, math.nan, 2.0]), " nan s"),
        (changed("fused", seconds=[]), "fused at decode, eager, batch 2, prompt 16 .*no time"),
        (changed("fused", arm="fast", mode="jit", phase="train"), "the phase, mode, arm of"),
        (entries() + entries()[:1], "baseline_naive .*decode, eager, batch 2, prompt 16"),
        (entries()[:-1], "decode, eager, batch 2, prompt 16 .*identity"),
        ([{"mode": "eager"}], "the phase, batch, prompt, arm, seconds, tokens, bytes_per_token of"),
    ],
)
def test_samples_that_cannot_be_compared_are_refused(cells, message):
    with pytest.raises(UserError, match=message):
        bench_rows(cells)


def test_a_file_becomes_rows_and_the_facts_they_share(tmp_path):
    document = synthetic_bench.decode(batches=(1,), prompts=(128,), rounds=7)
    bench = decode_rows.read(synthetic_bench.write(document, tmp_path / "decode.json"))
    assert bench.read_bandwidth is not None
    assert (bench.read_bandwidth.value, bench.read_bandwidth.n) == (20e9, 3)
    assert dict(bench.unavailable) == {"cudagraph": "no GPU"}
    assert bench.facts["commit"] == "a" * 40
    assert (bench.facts["new_tokens"], bench.facts["block"], bench.facts["warmup"]) == (256, 32, 3)
    (row,) = bench.where(phase="decode", mode="compile", arm="fused")
    (entry,) = (c for c in document["cells"] if (c["mode"], c["phase"], c["arm"]) == ("compile", "decode", "fused"))
    assert row["tokens_per_s"] == pytest.approx(32 / sorted(entry["seconds"])[3], rel=1e-12)
    assert row["read_share"] == pytest.approx(row["tokens_per_s"] * entry["bytes_per_token"] / 20e9, rel=1e-12)
    frame = pd.DataFrame(bench.records)
    assert len(frame) == len(document["cells"]) == 15
    assert set(frame["torch"]) == {"2.13.0"}
    assert not frame.columns.duplicated().any()
    pd.testing.assert_series_equal(
        frame["ratio_baseline"], pd.Series([r["ratio_baseline"] for r in bench.rows], name="ratio_baseline")
    )


def test_a_file_of_another_kind_or_shape_is_refused_by_name(tmp_path):
    def refused(document, message):
        path = synthetic_bench.write(document, tmp_path / "b")
        with pytest.raises(UserError, match=message) as refusal:
            decode_rows.read(path)
        assert str(path) in str(refusal.value)

    sizes = {"batches": (1,), "prompts": (128,), "rounds": 2}
    refused(synthetic_bench.decode(**sizes, schema_version=2), "schema_version 2")
    refused(synthetic_bench.decode(**sizes, machine={"device": "cpu"}), "machine.threads")
    refused(synthetic_bench.decode(**sizes, cells=[]), "samples")
    refused(synthetic_bench.last_token(**sizes), "kind 'bench_last_token'.* 'bench_decode'")
    unnamed = synthetic_bench.decode(**sizes)
    unnamed["job"]["variant"] = "gpt2"
    refused(unnamed, "variant 'gpt2'.* baseline")
    (tmp_path / "damaged.json").write_text("{")
    for name in ("damaged.json", "missing.json"):
        with pytest.raises(UserError, match=name):
            decode_rows.read(tmp_path / name)
