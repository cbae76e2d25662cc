"""The table of a stage from made-up losses: gaps and intervals against SciPy's own paired test."""

import re
import statistics

import pytest
from scipy import stats as scipy_stats
from synthetic_study import BASELINE, LATER, LOSSES, SEEDS, stage_job, write_stage

from tapernorm.util.errors import UserError
from tapernorm_lab.report import table
from tapernorm_lab.report.frames import study_stages as study_rows
from tapernorm_lab.report.tables import study_stages as study_tables


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    return study_rows.collect(write_stage(folder), folder)


@pytest.fixture(scope="module")
def made(rows):
    return study_tables.stage_table(rows, stage_job())


def record_of(made, arm):
    (record,) = [r for r in made.records if r["arm"] == arm]
    return record


def line_of(made, arm):
    """Header -> cell of an arm's printed line."""
    number = [record["arm"] for record in made.records].index(arm)
    return dict(zip([column.header for column in made.columns], made.rows[number], strict=True))


def percents(losses, baseline):
    return [100 * (losses[s] - baseline[s]) / baseline[s] for s in SEEDS]


def test_gap_and_interval_are_those_of_a_paired_t_test(made):
    record = record_of(made, "later")
    gaps = percents(LATER, BASELINE)
    interval = scipy_stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    found = (record["gap_percent"], record["gap_low"], record["gap_high"])
    assert found == pytest.approx((-1.0, interval.low, interval.high), rel=1e-12)
    assert (record["gap_pairs"], record["gap_to"]) == (3, "baseline")
    unpaired = scipy_stats.ttest_ind(list(LATER.values()), list(BASELINE.values())).confidence_interval(0.95)
    assert abs(unpaired.low / 3 * 100 - record["gap_low"]) > 10  # the control: without pairing it is far wider
    assert line_of(made, "later")["gap %"] == f"−1.00 [{interval.low:.2f}, {interval.high:.2f}]".replace("-", "−")


def test_the_best_baseline_is_compared_with_too(made):
    """Half the learning rate has the lower mean on these seeds: what gains only against the other gains nothing."""
    record = record_of(made, "later")
    gaps = percents(LATER, LOSSES["slow"])
    interval = scipy_stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    assert record["best_gap_to"] == "slow"
    assert record["best_gap_percent"] == pytest.approx(sum(gaps) / 3, rel=1e-12)
    assert record["best_gap_percent"] > 0 > record["gap_percent"]
    assert (record["best_gap_low"], record["best_gap_high"]) == pytest.approx((interval.low, interval.high), rel=1e-12)
    assert "The best Baseline, by its mean on these very seeds, is Baseline, half the rate." in made.notes
    assert line_of(made, "slow")["to best Baseline %"] == table.ABSENT
    assert line_of(made, "baseline")["gap %"] == table.ABSENT


def test_an_arm_with_a_treatment_or_a_taper_is_no_baseline_to_choose(rows):
    better = rows.assign(valid_ce=rows["valid_ce"].where(rows["arm"] == "baseline", rows["valid_ce"] - 1))
    worse = better.assign(valid_ce=better["valid_ce"].where(better["arm"] != "slow", 9.0))
    assert record_of(study_tables.stage_table(worse, stage_job()), "later")["best_gap_to"] == "baseline"
    headers = [column.header for column in study_tables.stage_table(worse, stage_job()).columns]
    assert "to best Baseline %" not in headers


def test_a_diverged_seed_is_counted_told_and_in_no_mean(made):
    record, line = record_of(made, "wild"), line_of(made, "wild")
    assert (record["n"], record["seeds"], record["diverged_seeds"], record["gap_pairs"]) == (1, 3, "1 3", 1)
    assert record["valid_ce_mean"] == 2.1
    assert (line["n"], line["loss"], line["gap %"]) == ("1 of 3", "2.1000", "5.00")
    told = [note for note in made.notes if "diverged at step" in note]
    assert told[0].startswith("Internal-Taper (+aux), seed 1, diverged at step 7: the cross-entropy is not finite.")
    assert len(told) == 2


def test_an_arm_of_which_every_seed_diverged_keeps_its_line(rows):
    gone = rows["arm"] == "later"
    lost = rows.assign(
        outcome=rows["outcome"].where(~gone, "diverged"), valid_ce=rows["valid_ce"].where(~gone, float("nan"))
    )
    line = line_of(study_tables.stage_table(lost, stage_job()), "later")
    assert (line["n"], line["loss"], line["gap %"]) == ("0 of 3", table.ABSENT, table.ABSENT)


def test_settings_are_printed_where_arms_differ_in_them(made):
    headers = [column.header for column in made.columns]
    assert headers[:4] == ["arm", "taper from", "to", "peak lr"]
    assert not {"clip", "lambda", "steps"} & set(headers)
    assert [line_of(made, "later")[name] for name in headers[1:4]] == ["0.3", "0.7", "0.003"]
    assert [line_of(made, "slow")[name] for name in headers[1:4]] == ["—", "—", "0.0015"]
    assert record_of(made, "later")["clip_norm"] == 1.0  # the CSV has them all


def test_loss_and_jump_are_means_with_their_spread(made):
    line = line_of(made, "later")
    mean, std = scipy_stats.tmean(list(LATER.values())), scipy_stats.tstd(list(LATER.values()))
    assert line["loss"] == f"{mean:.4f} ± {std:.4f}"
    assert line["jump"] == "0.0200 ± 0.0100"
    assert line_of(made, "papers")["jump"] == table.ABSENT


@pytest.mark.parametrize("tail", [0.045, 48000.0])
def test_a_column_of_which_one_sd_is_above_its_mean_has_medians_in_every_cell(rows, tail):
    """Of the jumps 0.01, 0.02 and `tail`, the sd is below the mean at 0.045 and above it at 48,000."""
    one = (rows["arm"] == "later") & (rows["seed"] == 3)
    changed = rows.assign(taper_start_jump=rows["taper_start_jump"].where(~one, tail))
    found = study_tables.stage_table(changed, stage_job())
    jumps = [0.01, 0.02, tail]
    heavy = statistics.stdev(jumps) > statistics.mean(jumps)
    assert heavy == (tail > 1)
    header = "jump, median [range]" if heavy else "jump"
    cells = [line_of(found, record["arm"])[header] for record in found.records if record["jump_n"] > 1]
    assert len(cells) == 2
    assert line_of(found, "later")[header] == ("0.020 [0.010, 48000]" if heavy else "0.0250 ± 0.0180")
    assert line_of(found, "relative")[header] == ("0.020 [0.010, 0.030]" if heavy else "0.0200 ± 0.0100")
    assert line_of(found, "wild")[header] == ("0.020" if heavy else "0.0200")  # of one seed that did not diverge
    assert any(header.split(",")[0] in note and ("median [smallest" in note) == heavy for note in found.notes)
    assert re.fullmatch(r"2\.\d+ ± 0\.\d+", line_of(found, "later")["loss"])  # the rule is of one column, not the table
    record = record_of(found, "later")
    assert [record[f"jump_{name}"] for name in ("median", "smallest", "largest")] == [0.02, 0.01, tail]
    assert record["jump_mean"] == pytest.approx(statistics.mean(jumps), rel=1e-12)


def test_runs_shared_with_the_papers_tables_are_named_and_the_rest_is_said_to_be_ours(made):
    assert "Also runs of the paper's own tables: Baseline; All-Taper (+aux)." in made.notes
    assert made.caption.startswith("Stage S1, beyond the paper: A question. d 64, seeds 1, 2, 3.")
    assert made.caption.endswith("Run demo: Embedded demo.")


def test_losses_on_different_text_are_not_compared(rows):
    other = rows.assign(valid_tokens=rows["valid_tokens"].where(rows["arm"] != "later", 777))
    with pytest.raises(UserError, match="scored on 777 and 50000 tokens"):
        study_tables.stage_table(other, stage_job())
