"""Tables 2, 2x and 2v1 from made-up rounds."""

import math
import re
from statistics import median

import pandas as pd
import pytest
import synthetic_bench

from tapernorm.util.errors import UserError
from tapernorm_lab.config import published
from tapernorm_lab.config.jobs import ReportJob
from tapernorm_lab.report.engine.cells import significant
from tapernorm_lab.report.frames import decoding as decode_rows
from tapernorm_lab.report.tables import table2_decoding as decode_tables

JOB = ReportJob(run="demo", caption="Embedded demo, not the paper's scale.", labels={})
SETTING = (
    "Measured on cpu, float32, 1 thread, with PyTorch 2.13.0 and Python 3.11.9. The model is Internal-Taper (+aux),"
    " d 512, 8 layers, 16 heads, vocabulary 10,000. "
)


def bench_of(document, folder, kind=decode_rows.DECODE):
    return decode_rows.read(synthetic_bench.write(document, folder / "bench.json"), kind=kind)


@pytest.fixture(scope="module")
def document():
    return synthetic_bench.decode(prompts=(128, 512), rounds=9)


@pytest.fixture(scope="module")
def bench(document, tmp_path_factory):
    return bench_of(document, tmp_path_factory.mktemp("decode"))


@pytest.fixture(scope="module")
def last_token(tmp_path_factory):
    document = synthetic_bench.last_token(batches=(1, 4), prompts=(128, 64), rounds=9)
    return bench_of(document, tmp_path_factory.mktemp("last"), decode_rows.LAST_TOKEN)


def seconds(document, arm, **where):
    wanted = {"phase": "decode", "mode": "eager", "batch": 4, "prompt": 512, "arm": arm, **where}
    (cell,) = (c for c in document["cells"] if all(c[key] == value for key, value in wanted.items()))
    return cell["seconds"], cell["tokens"]


def test_table_2_has_the_papers_rows_against_the_papers_baseline(bench, document):
    made = decode_tables.table2(bench, JOB)
    assert [line[:3] for line in made.rows] == [
        [*where, model]
        for heading in (["1", "128"], ["1", "512"], ["4", "128"], ["4", "512"])
        for where, model in (
            (heading, "Baseline"),
            (["", ""], "Internal-Taper unfused"),
            (["", ""], "Internal-Taper fused"),
        )
    ]
    naive, tokens = seconds(document, "baseline_naive")
    fused, _ = seconds(document, "fused")
    *_, speed, ratio = made.rows[-1]
    assert re.fullmatch(r"\d{3}\.\d \[\d{3}\.\d, \d{3}\.\d\]", speed)
    assert speed.split()[0] == f"{median(tokens / s for s in fused):.1f}"
    assert ratio.split()[0] == f"{median(n / f for n, f in zip(naive, fused, strict=True)):.3f}"
    assert made.rows[-3][4] == "—"  # Baseline has no ratio to itself
    assert made.published == [
        ["Kanavalau et al.", "all", "Internal-Taper unfused", "—", "1.10–1.14"],
        ["Kanavalau et al.", "all", "Internal-Taper fused", "—", "1.15–1.18"],
    ]


def test_table_2_is_eager_decoding_alone(bench):
    frame = pd.DataFrame(decode_tables.table2(bench, JOB).records)
    assert (set(frame["mode"]), set(frame["phase"])) == ({"eager"}, {"decode"})
    ranges = frame.set_index("arm")[["published_ratio_low", "published_ratio_high"]]
    assert ranges.loc["fused"].drop_duplicates().to_numpy().tolist() == [[1.15, 1.18]]
    assert ranges.loc["baseline_naive"].isna().to_numpy().all()


def test_captions_name_device_software_model_and_rounds(bench, last_token):
    decoding = "A round decodes 256 new tokens in blocks of 32. Timed: 9 rounds after 3 untimed."
    for make in (decode_tables.table2, decode_tables.table2x):
        caption = make(bench, JOB).caption
        assert f"Run demo: {JOB.caption} {SETTING}{decoding}" in caption
    assert decode_tables.table2v1(last_token, JOB).caption.endswith(f"{SETTING}Timed: 9 rounds after 3 untimed.")


def test_notes_state_checks_missing_modes_machine_and_code(bench):
    for make in (decode_tables.table2, decode_tables.table2x):
        notes = make(bench, JOB).notes
        assert "CUDA graph was asked for and could not be measured: no GPU." in notes
        assert f"No TF32; load 0.25 before, 1.10 after. Code commit: {'a' * 12}." in notes
        (checks,) = (note for note in notes if note.startswith("Largest difference"))
        assert "unfused 1.5e-06 (logits' RMS 5.1); Internal-Taper fused 2.5e-06" in checks
    assert any(
        "2602.10408v2" in note and "not measured here" in note for note in decode_tables.table2(bench, JOB).notes
    )


def test_a_gpus_clocks_and_tf32_are_stated(tmp_path):
    machine = {"device": "GPU", "threads": 2, "tf32": True, "clocks": {"sm_mhz": 1980}, "load_before": None}
    document = synthetic_bench.decode(("eager",), (1,), (128,), 6, machine={**machine, "load_after": 0.5})
    document["provenance"]["commit"] = "b" * 40 + "+dirty"
    made = decode_tables.table2(bench_of(document, tmp_path), JOB)
    assert made.notes[-1] == f"TF32 on, sm_mhz 1980; load — before, 0.50 after. Code commit: {'b' * 12}+dirty."
    assert "GPU, float32, 2 threads" in made.caption


def test_few_rounds_and_one_round_are_said_to_tell_little(tmp_path):
    few = decode_tables.table2(bench_of(synthetic_bench.decode(("eager",), (1,), (128,), 3), tmp_path), JOB)
    assert any("fewer than 6 rounds" in note for note in few.notes)
    one = bench_of(synthetic_bench.decode(("eager",), (1,), (128,), 1), tmp_path)
    assert "[" not in "".join(cell for line in decode_tables.table2(one, JOB).rows for cell in line)
    assert "1 round after" in decode_tables.table2(one, JOB).caption


def test_table_2x_has_every_mode_and_phase_against_the_better_baseline(bench, document):
    made = decode_tables.table2x(bench, JOB)
    places = [("decode", "eager"), ("decode", "torch.compile"), ("prefill", "eager")]
    assert [tuple(line[:4]) for line in made.rows] == [(*p, b, n) for p in places for b in "14" for n in ("128", "512")]
    headers = [f"{column.group}: {column.header}".removeprefix(": ") for column in made.columns]
    line = dict(zip(headers, made.rows[7], strict=True))
    times = {arm: seconds(document, arm, mode="compile")[0] for arm in synthetic_bench.ARMS}
    ratios = {
        arm: f"{median(b / a for a, b in zip(t, times['baseline'], strict=True)):.3f}" for arm, t in times.items()
    }
    assert line["ratio to F.rms_norm: several-op"] == ratios["baseline_naive"]
    assert line["ratio to F.rms_norm: bound"] == ratios["identity"]
    assert line["ratio to F.rms_norm: fused"].startswith(f"{ratios['fused']} [")
    assert line["ratio to F.rms_norm: unfused"].startswith(f"{ratios['unfused']} [")
    speed = median(128 / s for s in times["fused"])
    moved = speed * (synthetic_bench.BYTES / 4 + 4096 * 512)
    assert line["Internal-Taper fused: GB/s"] == f"{moved / 1e9:.1f}"
    assert line["Internal-Taper fused: % of read"] == f"{100 * moved / 20e9:.0f}"
    assert made.rows[-1][-2:] == ["—", "—"]  # prefill reads what it computes with many times over
    assert any("20.0 [19.0, 20.5] GB/s" in note for note in made.notes)
    assert len(pd.DataFrame(made.records)) == len(document["cells"])


def test_without_a_measured_bandwidth_no_share_is_printed(tmp_path):
    document = synthetic_bench.decode(("eager",), (1,), (128,), 6, read_bandwidth=None)
    made = decode_tables.table2x(bench_of(document, tmp_path), JOB)
    assert (made.rows[0][5], made.rows[0][-1]) == ("—", "—")
    assert any(note.endswith("read bandwidth was not measured.") for note in made.notes)


def test_table_2v1_prints_the_published_rows_beside_ours_and_the_others_beneath(last_token):
    made = decode_tables.table2v1(last_token, JOB)
    theirs = {(line[0], line[1]): made.rows[i : i + 5] for i, line in enumerate(made.rows) if line[0]}
    assert list(theirs) == [("1", "64"), ("1", "128"), ("4", "64"), ("4", "128")]
    assert [line[2] for line in theirs[("1", "128")]] == [
        "Baseline",
        "Baseline, F.rms_norm",
        "Internal-Taper unfused",
        "Internal-Taper fused",
        "no norm at all (bound)",
    ]
    beside = [line[6:] for line in theirs[("4", "128")]]
    assert beside == [["149.3", "—"], ["—", "—"], ["—", "—"], ["180.4", "1.208"], ["—", "—"]]
    assert [line[6:] for line in theirs[("4", "64")]] == [["—", "—"]] * 5
    foot = [["1", "256"], ["1", "512"], ["4", "256"], ["4", "512"]]
    assert [line[:2] for line in made.published[::2]] == foot
    assert made.published[-1] == ["", "", "Internal-Taper fused", "—", "—", "—", "615.9", "1.127"]
    assert all(c.group == "Kanavalau et al., v1, second-hand" for c in made.columns[-2:])
    assert any("2602.10408v1" in note and "not measured here" in note for note in made.notes)


def test_table_2v1_counts_thousands_of_prompt_tokens(last_token):
    made = decode_tables.table2v1(last_token, JOB)
    (row,) = last_token.where(batch=4, prompt=128, arm="fused")
    printed = made.rows[-2]
    assert printed[3].split()[0] == f"{row['tokens_per_s'] / 1000:.2f}"
    assert printed[4].split()[0] == f"{row['ratio_baseline_naive']:.3f}"
    assert printed[5].split()[0] == f"{row['ratio_baseline']:.3f}"
    (line,) = [r for r in made.records if (r["arm"], r["batch"], r["prompt"]) == ("fused", 4, 128)]
    assert (line["published_ktokens_per_s"], line["published_ratio"]) == (180.4, 180.4 / 149.3)


def test_published_ratios_span_what_the_first_version_claims():
    ratios = sorted(line.ratio for line in published.TABLE2V1)
    assert (f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}") == ("1.13", "1.22")


def test_the_two_measurements_never_meet_and_table_2x_needs_no_eager_mode(bench, last_token, tmp_path):
    compiled = bench_of(synthetic_bench.decode(("compile",), (1,), (128,), 2), tmp_path)
    for make, given, message in (
        (decode_tables.table2v1, bench, "table2v1 needs eager mode, .*: run `tapernorm bench last_token`"),
        (decode_tables.table2, last_token, "table2 needs eager mode, .*: run `tapernorm bench decode`"),
        (decode_tables.table2x, last_token, "table2x needs decoding"),
        (decode_tables.table2, compiled, "table2 needs eager mode"),
    ):
        with pytest.raises(UserError, match=message):
            make(given, JOB)
    assert decode_tables.table2x(compiled, JOB).rows[0][1] == "torch.compile"


@pytest.mark.parametrize(
    ("value", "printed"), [(0.012346, "0.01235"), (9.8765, "9.877"), (987.65, "987.6"), (12345.6, "12,346")]
)
def test_speeds_have_four_significant_digits_and_never_fewer_than_the_units(value, printed):
    row = {"speed": value, "speed_low": math.nan, "speed_high": math.nan}
    assert significant("speed")(row) == printed
