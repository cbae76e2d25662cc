"""Tables S3 and S3x against sums by hand over the made-up scores, and their words."""

import json
import math
from statistics import fmean, stdev

import pytest
import synthetic_robustness
from scipy import stats as scipy_stats
from synthetic_robustness import TRIALS, loss

from tapernorm_lab.config.odd_inputs import OddInputsReportJob
from tapernorm_lab.report import table
from tapernorm_lab.report.engine.cells import NOT_FINITE, share, shown
from tapernorm_lab.report.frames import odd_inputs as robustness_rows
from tapernorm_lab.report.frames.odd_inputs_summary import records
from tapernorm_lab.report.tables import odd_inputs as robustness_table

JOB = OddInputsReportJob(
    run="cpu", caption="Not the paper's scale.", stage=None, cells=(), models=synthetic_robustness.LABELS
)
SEEDS = (1, 2, 3)


def printed_loss(value):
    return shown(value, robustness_table.digits, lost=NOT_FINITE)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    paths = synthetic_robustness.write_run(tmp_path_factory.mktemp("run"), seeds=SEEDS)
    return robustness_rows.collect(paths, run="cpu")


@pytest.fixture(scope="module")
def found(rows):
    return {(r["d_model"], r["trial"], r["part"], r["model"]): r for r in records(rows, run="cpu")}


def interval(values):
    """Mean and 95 % t interval, from the definition."""
    half = scipy_stats.t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return [fmean(values), fmean(values) - half, fmean(values) + half]


def test_ratios_and_excesses_are_paired_by_seed(found):
    for (d, trial, part, model), row in found.items():
        mine, theirs = ([loss(m, d, seed, trial, part) for seed in SEEDS] for m in (model, "baseline"))
        assert (row["n"], row["seeds"]) == (3, "1 2 3")
        assert [row["ce_mean"], row["ce_std"]] == pytest.approx([fmean(mine), stdev(mine)])
        if model == "baseline":
            assert (row["n_pairs"], row["blown"]) == (0, None)
            assert math.isnan(row["ratio"])
            continue
        logs = interval([math.log(v / b) for v, b in zip(mine, theirs, strict=True)])
        assert [row[f"ratio{x}"] for x in ("", "_low", "_high")] == pytest.approx([math.exp(x) for x in logs])
        excess = interval([v - b for v, b in zip(mine, theirs, strict=True)])
        assert [row[f"excess{x}"] for x in ("", "_low", "_high")] == pytest.approx(excess)
    row = found[48, "code", "all", "all"]
    unpaired = fmean(loss("all", 48, s, "code", "all") for s in SEEDS) / fmean(
        loss("baseline", 48, s, "code", "all") for s in SEEDS
    )
    assert abs(row["ratio"] / unpaired - 1) > 1e-4  # what means of unpaired seeds would say


def test_what_repeats_add_is_a_models_own_loss_with_them_less_that_without(found):
    for model in ("baseline", "internal_aux", "all", "all_aux"):
        added = [loss(model, 48, s, "rare", "after") - loss(model, 48, s, "held_out", "unrepeated") for s in SEEDS]
        row = found[48, "rare", "after", model]
        assert [row[f"added{x}"] for x in ("", "_low", "_high")] == pytest.approx(interval(added))
    assert math.isnan(found[48, "rare", "repeats", "all"]["added"])


def test_quantiles_are_averaged_maxima_are_of_all_and_counts_are_summed(found):
    row = found[48, "code", "all", "all"]
    scores = [synthetic_robustness.score("all", 48, seed, "code", "all") for seed in SEEDS]
    assert row["rows_p99_9"] == pytest.approx(fmean(s["rows"]["p99_9"] for s in scores))
    assert row["tokens_median"] == pytest.approx(fmean(s["tokens"]["median"] for s in scores))
    assert row["rows_max"] == max(s["rows"]["max"] for s in scores)
    assert row["excess_max"] == max(s["beside_baseline"]["excess_max"] for s in scores)
    assert (row["blown"], row["baseline_blown"], row["rows_nonfinite"]) == (30 + 60 + 90, 0, 0)
    assert (row["worst_seed"], row["worst_row"]) == (3, 10)


def test_table_s3_has_a_line_per_width_and_kind_of_row(rows, found):
    made = robustness_table.table_s3(rows, JOB)
    kinds = [
        "held-out text",
        "Python standard library",
        "rare token repeated: the repeats",
        "rare token repeated: text after",
        "positions 0–63",
        "positions 64–95",
    ]
    assert [line[1] for line in made.rows] == 2 * kinds
    assert [line[0] for line in made.rows if line[0]] == ["32", "48"]
    heads = [(column.group, column.header) for column in made.columns]
    assert heads[6:] == [
        (label, header)
        for label in ("Internal-Taper (+aux)", "All-Taper (+aux)")
        for header in ("× Baseline", "worst row", "blown up")
    ]
    line, row = made.rows[7], found[48, "code", "all", "all_aux"]
    assert line[2:6] == ["300", "3", f"{found[48, 'code', 'all', 'baseline']['ce_mean']:.2f}", "12.6"]
    assert line[9] == f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
    assert line[10:] == [f"{row['rows_max']:.1f}", "20.0 %"]  # 180 of 900
    assert made.rows[0][8] == "0 %"
    assert len(made.records) == len(found)  # the CSV holds every model, the parts that are not printed too


def test_the_notes_hold_what_no_column_does(rows, found):
    notes = robustness_table.table_s3(rows, JOB).notes
    printed = 2 * (200 + 300 + 200 + 200 + 90 + 90) * 2 * 3
    (told,) = [note for note in notes if "Conversely" in note]
    assert f"24 of {printed:,} rows" in told  # one a seed on either part of rare
    assert f"{math.log(1024):.2f}" in told
    (added,) = [note for note in notes if note.startswith("rare token repeated, d 48")]
    for model in ("baseline", "internal_aux", "all_aux"):
        row = found[48, "rare", "after", model]
        ends = f"{row['added']:.2f} [{row['added_low']:.2f}, {row['added_high']:.2f}]"
        assert f"{row['label']}: {ends}." in added
    assert "Python standard library: somewhere of code." in notes
    assert notes[-1].endswith("Code commit: aaaaaaaaaaaa.")


def test_one_seed_has_no_interval_and_a_missing_seed_is_counted(tmp_path):
    paths = synthetic_robustness.write_run(tmp_path, widths=(48,), seeds=(1, 2))
    one = robustness_rows.collect(paths[:1], run="cpu")
    line = robustness_table.table_s3(one, JOB).rows[1]
    assert line[6] == f"{loss('internal_aux', 48, 1, 'code', 'all') / loss('baseline', 48, 1, 'code', 'all'):.3f}"
    paths[1].write_text(paths[1].read_text().replace('"all_aux"', '"all_new"').replace("(+aux)", "(new)"))
    both = robustness_table.table_s3(robustness_rows.collect(paths, run="cpu"), JOB)
    assert {line[3] for line in both.rows} == {"1/2"}


def test_losses_that_are_not_finite_are_said_to_be(tmp_path):
    paths = synthetic_robustness.write_run(tmp_path, widths=(48,))
    text = paths[0].read_text()
    document = json.loads(text)
    for entry in document["scores"]:
        if (entry["model"], entry["trial"]) == ("all_aux", "code"):
            entry["rows"] |= {"mean": None, "max": None, "nonfinite": 3}
            entry["beside_baseline"] |= {"excess_max": None, "excess_p99_9": None, "blown": 3}
    paths[0].write_text(json.dumps(document))
    rows = robustness_rows.collect(paths, run="cpu")
    line = robustness_table.table_s3(rows, JOB).rows[1]
    assert line[9:11] == ["not finite", "not finite"]
    code = [line for line in robustness_table.table_s3x(rows, JOB).rows if line[1] == "All-Taper (+aux)"][1]
    assert [code[3], code[6], code[11], code[13]] == ["not finite", "not finite", "not finite", "3"]


def test_table_s3x_has_a_line_per_model_of_the_widest_and_its_csv_has_all(rows):
    made = robustness_table.table_s3x(rows, JOB)
    parts = sum(len(parts) for _, _, parts in TRIALS.values())
    assert len(made.rows) == (parts - 1) * 4  # without the text that follows no repeats
    assert len(made.records) == parts * (4 + 3)
    assert all(len(line) == len(made.columns) for line in made.rows)
    assert [line[0] for line in made.rows[:5]] == ["held-out text", "", "", "", "Python standard library"]
    baseline = made.rows[0]
    assert baseline[1] == "Baseline"
    assert baseline[10:13] == ["—", "—", "—"]
    assert made.columns[-1].code


@pytest.mark.parametrize(
    ("count", "of", "text"),
    [
        (0, 10, "0 %"),
        (10, 10, "100 %"),
        (1, 10_000, "0.1 %"),
        (9_999, 10_000, "99.9 %"),
        (1, 8, "12.5 %"),
        (None, 0, "—"),
    ],
)
def test_a_share_is_nought_or_all_only_where_it_is(count, of, text):
    assert share("blown", of=lambda _: of)({"blown": count}) == text


def test_losses_are_printed_in_as_many_digits_as_tell_something():
    assert [printed_loss(x) for x in (3.9251, 23.57, 391.06, math.nan)] == [
        "3.93",
        "23.6",
        "391",
        "not finite",
    ]


def test_the_table_of_arms_has_a_line_per_kind_and_arm_with_the_tails_that_the_rows_have(tmp_path):
    paths = synthetic_robustness.write_run(tmp_path, widths=(32,), seeds=SEEDS)
    rows = robustness_rows.collect(paths, run="cpu")
    labels = synthetic_robustness.LABELS | {"gone": "DyT"}
    cells = tuple((32, seed) for seed in SEEDS)
    job = JOB.model_copy(update={"stage": "S2", "cells": cells, "models": labels})
    made = robustness_table.table_of_arms(rows, job)
    assert made.name == "table_S3_S2"
    heads = [column.header for column in made.columns]
    printed = [row for row in records(rows, run="cpu") if row["part"] != "unrepeated"]
    for line, row in zip(made.rows, printed, strict=True):
        cells = dict(zip(heads, line, strict=True))
        assert cells["arm"] == row["label"]
        assert cells["mean"] == printed_loss(row["ce_mean"])
        assert [cells[f"{name} row"] for name in ("median", "p99.9", "worst")] == [
            printed_loss(row[f"rows_{name}"]) for name in ("median", "p99_9", "max")
        ]
        assert (cells["× Baseline"] == table.ABSENT) == (row["model"] == "baseline")
        assert (cells["n"], cells["not finite"]) == ("3", "0")
        if row["model"] == "all_aux":
            assert cells["blown up"] == ("20.0 %" if row["trial"] == "code" else "0 %")  # 180 of 900
    assert "DyT diverged at seed 1, 2, 3 and has no score there: see Table S2." in made.notes
    assert sum("diverged" in note for note in made.notes) == 1
