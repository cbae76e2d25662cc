"""Table 1 from made-up losses whose gaps are known."""

import re

import pandas as pd
import pytest

from tapernorm.util.errors import UserError
from tapernorm_lab.config.jobs import ReportJob
from tapernorm_lab.report.tables import table1_pretraining as tables

JOB = ReportJob(run="demo", caption="Embedded demo, not the paper's scale.", labels={})
BASELINE = [3.0, 2.0, 4.0]
INTERNAL = [3.03, 2.04, 4.06]  # 1 %, 2 % and 1.5 % above: 1.5 +- 4.3026527 * 0.5 / sqrt(3)


def results(losses, **columns):
    """A results frame from (variant, width) -> losses by seed, where None is a seed that did not run."""
    fixed = {"steps": 400, "lr": 0.003, "batch": 4, "context": 256, "valid_tokens": 5000}
    fixed |= {"parameters": 1_027_520, "device": "cpu", "commit": "c" * 40, "torch": "2.13.0"}
    fixed |= {"settings_hash": "s" * 16, "taper_hash": "t" * 16}
    fixed |= {f"valid_ce_{form}": float("nan") for form in ("gated", *tables.FORMS)} | columns
    return pd.DataFrame(
        {"variant": v, "d_model": d, "seed": seed, "valid_ce": loss, "bits_per_byte": loss / 2, **fixed}
        for (v, d), by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
        if loss is not None
    )


def table1(frame, **job):
    return tables.table1((frame, pd.DataFrame()), JOB.model_copy(update=job))


def row_of(made, variant, d_model=64, counted=tables.ALL_SEEDS):
    frame = pd.DataFrame(made.records)
    chosen = (frame["variant"] == variant) & (frame["d_model"] == d_model) & (frame["seeds_counted"] == counted)
    (row,) = frame[chosen].to_dict("records")
    return row


def test_a_row_states_means_spread_and_the_paired_gap():
    frame = results({("internal_aux", 64): INTERNAL, ("baseline", 64): BASELINE})
    made = table1(frame, labels={64: "1M"})
    row = row_of(made, "internal_aux")
    gap = [row["gap_percent"], row["gap_low"], row["gap_high"]]
    assert gap == pytest.approx([1.5, 1.5 - 1.24206886, 1.5 + 1.24206886], abs=1e-8)
    assert row["valid_ce_mean"] == pytest.approx(9.13 / 3)
    assert row["bits_per_byte_mean"] == pytest.approx(9.13 / 6)
    assert (row["n"], row["n_pairs"], row["paired_seeds"]) == (3, 3, "0 1 2")
    assert (row["published_gap_low"], row["published_gap_high"]) == (0.7, 1.5)
    assert made.rows == [
        ["1M", "64", "1,027,520", "400", "3", "3.0000 ± 1.0000", "3.0433 ± 1.0101", "1.50 [0.26, 2.74]", "—", "—"]
    ]


def test_the_gap_is_not_that_of_the_means():
    made = table1(results({("baseline", 64): BASELINE, ("internal_aux", 64): INTERNAL}))
    means = row_of(made, "internal_aux")["valid_ce_mean"] / row_of(made, "baseline")["valid_ce_mean"]
    assert abs(100 * (means - 1) - row_of(made, "internal_aux")["gap_percent"]) > 0.05


def test_widths_are_in_order_and_every_variant_is_in_the_csv():
    losses = {(v, d): [3.0, 3.1] for d in (128, 64) for v in ("all", "all_aux", "baseline", "internal")}
    made = table1(results(losses))
    assert [line[1] for line in made.rows] == ["64", "128"]
    assert pd.DataFrame(made.records)[["d_model", "variant"]].to_numpy().tolist() == [
        [d, v] for d in (64, 128) for v in ("baseline", "internal", "all", "all_aux")
    ]
    assert [line[6] for line in made.rows] == ["—", "—"]  # no Internal-Taper (+aux) ran


def test_one_seed_has_neither_spread_nor_interval():
    made = table1(results({("baseline", 64): [4.0], ("all_aux", 64): [3.9]}))
    assert made.rows[0][4:] == ["1", "4.0000", "—", "—", "3.9000", "−2.50"]


def test_without_baseline_there_is_no_gap():
    made = table1(results({("internal_aux", 64): INTERNAL}))
    assert made.rows[0][4:] == ["3", "—", "3.0433 ± 1.0101", "—", "—", "—"]


def test_seeds_that_only_one_side_has_are_stated_and_not_paired():
    losses = {("baseline", 64): [3.0, 2.0, 4.0, 9.0], ("all_aux", 64): [3.03, None, 4.06, 9.18]}
    made = table1(results(losses))
    row = row_of(made, "all_aux")
    assert row["paired_seeds"] == "0 2 3"
    assert row["gap_percent"] == pytest.approx(1.5)
    assert made.rows[0][4] == "4/3"


OUTLYING = {
    ("baseline", 64): [2.0, 2.5, 3.0, 3.5, 4.0, 30.0],  # seed 5 is far off here
    ("internal_aux", 64): [2.02, 2.525, 3.03, 3.535, 4.04, 4.1],
    ("all_aux", 64): [40.0, 2.55, 3.06, 3.57, 4.08, 4.2],  # and seed 0 here
}


def test_a_second_row_leaves_outliers_out_and_keeps_the_pairs():
    made = table1(results(OUTLYING))
    assert [(line[0], line[4]) for line in made.rows] == [("64", "6"), ("64†", "5/6/5")]
    internal = row_of(made, "internal_aux", counted=tables.TRIMMED)
    assert (internal["seeds"], internal["paired_seeds"]) == ("0 1 2 3 4 5", "0 1 2 3 4")
    assert internal["gap_percent"] == pytest.approx(1.0)
    both = row_of(made, "all_aux", counted=tables.TRIMMED)
    assert (both["seeds"], both["paired_seeds"]) == ("1 2 3 4 5", "1 2 3 4")
    assert both["gap_percent"] == pytest.approx(2.0)
    assert row_of(made, "all_aux")["n_pairs"] == 6
    (note,) = [note for note in made.notes if note.startswith("†")]
    assert "more than 3 MAD" in note
    (named,) = [note for note in made.notes if note.startswith("64†")]
    assert re.search(r"Baseline seed 5 \([^)]* MAD\)\. All-Taper \(\+aux\) seed 0 \([^)]* MAD\)\.$", named)


def test_an_outlier_of_a_variant_that_is_not_printed_adds_no_printed_row():
    losses = {("baseline", 64): [2.0, 2.1, 2.2, 2.3], ("all", 64): [2.0, 2.1, 2.2, 90.0]}
    made = table1(results(losses))
    assert len(made.rows) == 1
    assert row_of(made, "all", counted=tables.TRIMMED)["left_out"].startswith("seed 3 (")


def test_notes_name_learning_rate_device_source_and_every_commit():
    frame = results({("baseline", 64): BASELINE, ("all_aux", 64): INTERNAL})
    plain = ["Peak learning rate 0.003.", f"Device cpu. PyTorch 2.13.0. Code commit: {'c' * 12}."]
    assert table1(frame).notes[-2:] == plain
    frame.loc[0, "commit"] = "d" * 40 + "+dirty"
    frame.loc[1, "commit"] = None
    notes = table1(frame).notes
    assert notes[-1].endswith(f"(3): {'c' * 12}, {'d' * 12}+dirty, unknown.")
    assert "different code" in table1(frame).caption
    assert any("arXiv 2602.10408v2" in note and "not measured here" in note for note in notes)


def test_notes_say_where_runs_differ_in_pytorch_or_in_their_config():
    frame = results({("baseline", 64): BASELINE, ("all_aux", 64): INTERNAL})
    frame.loc[frame["variant"] == "baseline", "taper_hash"] = None
    assert not any("versions" in note for note in table1(frame).notes)
    frame.loc[0, "torch"] = "2.12.1"
    frame.loc[1, "settings_hash"] = "u" * 16
    frame.loc[4, "taper_hash"] = "v" * 16
    notes = table1(frame).notes
    assert any("PyTorch, not all the same (2): 2.12.1, 2.13.0." in note for note in notes)
    assert [
        what for what in ("settings", "taper") for note in notes if f"2 versions of the config: {what}" in note
    ] == [
        "settings",
        "taper",
    ]


def test_the_note_on_folding_states_the_largest_move_of_any_form_and_model():
    frame = results({("baseline", 64): BASELINE, ("internal_aux", 64): INTERNAL, ("all", 128): [3.0, 4.0]})
    columns = ["valid_ce_gated", "valid_ce_unfused", "valid_ce_fused"]

    def told():
        return [re.findall(r"\d\S*", note) for note in table1(frame).notes if note.startswith("Folding")]

    assert told() == []
    frame.loc[3:, columns] = [[3.0, 3.0, 3.0], [2.0, 2.0, 2.0], [4.0, 4.0, 4.0], [3.0, 3.0, 3.0], [4.0, 4.0, 4.0]]
    assert told() == [["5", "0.0e+00"]]
    frame.loc[4, "valid_ce_fused"] = 2.0 + 3e-7  # up, in one form
    assert told() == [["5", "3.0e-07"]]
    frame.loc[7, "valid_ce_unfused"] = 4.0 - 5e-6  # down, in the other, of a variant that is not printed
    assert told() == [["5", "5.0e-06"]]
    frame.loc[7, columns] = float("nan")  # not folded: neither counted nor compared
    assert told() == [["4", "3.0e-07"]]


@pytest.mark.parametrize("column", ["steps", "lr", "batch", "context", "valid_tokens"])
def test_runs_that_are_not_alike_are_refused(column):
    frame = results({("baseline", 64): BASELINE, ("all_aux", 64): INTERNAL})
    frame.loc[0, column] *= 2
    with pytest.raises(UserError, match=f"of d_model 64 differ in {column}"):
        table1(frame)


def test_a_run_without_results_is_refused():
    with pytest.raises(UserError, match="run demo has no results"):
        table1(results({}))
