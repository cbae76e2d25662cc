"""Table 1 from made-up losses whose gaps are known."""

import re

import pandas as pd
import pytest

from tapernorm.util.errors import UserError
from tapernorm_lab.config.jobs import ReportJob
from tapernorm_lab.report import table
from tapernorm_lab.report.tables import table1_pretraining as tables

JOB = ReportJob(run="demo", caption="Embedded demo, not the paper's scale.", labels={})
CURVES = pd.DataFrame()
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


def row_of(made, variant, d_model=64, counted=tables.ALL_SEEDS):
    frame = pd.DataFrame(made.records)
    chosen = (frame["variant"] == variant) & (frame["d_model"] == d_model) & (frame["seeds_counted"] == counted)
    (row,) = frame[chosen].to_dict("records")
    return row


def test_a_row_states_means_spread_and_the_paired_gap():
    frame = results({("internal_aux", 64): INTERNAL, ("baseline", 64): BASELINE})
    made = tables.table1((frame, CURVES), JOB.model_copy(update={"labels": {64: "1M"}}))
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
    made = tables.table1((results({("baseline", 64): BASELINE, ("internal_aux", 64): INTERNAL}), CURVES), JOB)
    means = row_of(made, "internal_aux")["valid_ce_mean"] / row_of(made, "baseline")["valid_ce_mean"]
    assert abs(100 * (means - 1) - row_of(made, "internal_aux")["gap_percent"]) > 0.05


def test_widths_are_in_order_and_every_variant_is_in_the_csv():
    losses = {(v, d): [3.0, 3.1] for d in (128, 64) for v in ("all", "all_aux", "baseline", "internal")}
    made = tables.table1((results(losses), CURVES), JOB)
    assert [line[1] for line in made.rows] == ["64", "128"]
    assert pd.DataFrame(made.records)[["d_model", "variant"]].to_numpy().tolist() == [
        [d, v] for d in (64, 128) for v in ("baseline", "internal", "all", "all_aux")
    ]
    assert [line[6] for line in made.rows] == ["—", "—"]  # no Internal-Taper (+aux) ran


def test_one_seed_has_neither_spread_nor_interval():
    made = tables.table1((results({("baseline", 64): [4.0], ("all_aux", 64): [3.9]}), CURVES), JOB)
    assert made.rows[0][4:] == ["1", "4.0000", "—", "—", "3.9000", "−2.50"]


def test_without_baseline_there_is_no_gap():
    made = tables.table1((results({("internal_aux", 64): INTERNAL}), CURVES), JOB)
    assert made.rows[0][4:] == ["3", "—", "3.0433 ± 1.0101", "—", "—", "—"]


def test_seeds_that_only_one_side_has_are_stated_and_not_paired():
    losses = {("baseline", 64): [3.0, 2.0, 4.0, 9.0], ("all_aux", 64): [3.03, None, 4.06, 9.18]}
    made = tables.table1((results(losses), CURVES), JOB)
    row = row_of(made, "all_aux")
    assert row["paired_seeds"] == "0 2 3"
    assert row["gap_percent"] == pytest.approx(1.5)
    assert made.rows[0][4] == "4/3"
    assert "At d 64, All-Taper (+aux) has no seed 1." in made.notes


OUTLYING = {
    ("baseline", 64): [2.0, 2.5, 3.0, 3.5, 4.0, 30.0],  # seed 5 is far off here
    ("internal_aux", 64): [2.02, 2.525, 3.03, 3.535, 4.04, 4.1],
    ("all_aux", 64): [40.0, 2.55, 3.06, 3.57, 4.08, 4.2],  # and seed 0 here
}


def test_a_second_row_leaves_outliers_out_and_keeps_the_pairs():
    made = tables.table1((results(OUTLYING), CURVES), JOB)
    assert [(line[0], line[4]) for line in made.rows] == [("64", "6"), ("64†", "5/6/5")]
    internal = row_of(made, "internal_aux", counted=tables.TRIMMED)
    assert (internal["seeds"], internal["paired_seeds"]) == ("0 1 2 3 4 5", "0 1 2 3 4")
    assert internal["gap_percent"] == pytest.approx(1.0)
    both = row_of(made, "all_aux", counted=tables.TRIMMED)
    assert (both["seeds"], both["paired_seeds"]) == ("1 2 3 4 5", "1 2 3 4")
    assert both["gap_percent"] == pytest.approx(2.0)
    assert row_of(made, "all_aux")["n_pairs"] == 6
    (note,) = [note for note in made.notes if note.startswith("† at d 64")]
    assert re.fullmatch(
        r"† at d 64 leaves out Baseline seed 5 \(.* MAD\); All-Taper \(\+aux\) seed 0 \(.* MAD\)\.", note
    )
    assert any("more than 3 MAD" in note for note in made.notes)


def test_an_outlier_of_a_variant_that_is_not_printed_adds_no_printed_row():
    losses = {("baseline", 64): [2.0, 2.1, 2.2, 2.3], ("all", 64): [2.0, 2.1, 2.2, 90.0]}
    made = tables.table1((results(losses), CURVES), JOB)
    assert len(made.rows) == 1
    assert row_of(made, "all", counted=tables.TRIMMED)["left_out"].startswith("seed 3 (")


def test_notes_name_learning_rate_device_source_and_every_commit():
    frame = results({("baseline", 64): BASELINE, ("all_aux", 64): INTERNAL})
    plain = f"Peak learning rate 0.003. Device cpu. PyTorch 2.13.0. Code commit: {'c' * 12}."
    assert plain in tables.table1((frame, CURVES), JOB).notes
    frame.loc[0, "commit"] = "d" * 40 + "+dirty"
    frame.loc[1, "commit"] = None
    notes = tables.table1((frame, CURVES), JOB).notes
    assert any(f"not all the same (3): {'c' * 12}, {'d' * 12}+dirty, unknown." in note for note in notes)
    assert any("arXiv 2602.10408v2" in note and "not measured here" in note for note in notes)


def test_notes_say_where_runs_differ_in_pytorch_or_in_their_config():
    frame = results({("baseline", 64): BASELINE, ("all_aux", 64): INTERNAL})
    frame.loc[frame["variant"] == "baseline", "taper_hash"] = None
    assert not any("differ in settings" in note for note in tables.table1((frame, CURVES), JOB).notes)
    frame.loc[0, "torch"] = "2.12.1"
    frame.loc[1, "settings_hash"] = "u" * 16
    frame.loc[4, "taper_hash"] = "v" * 16
    notes = tables.table1((frame, CURVES), JOB).notes
    assert any("PyTorch, not all the same (2): 2.12.1, 2.13.0." in note for note in notes)
    for what in ("model and training", "taper"):
        assert f"The runs differ in settings of {what} that one config gives all of them: 2 versions." in notes


def fold_notes(frame):
    return [note for note in tables.table1((frame, CURVES), JOB).notes if note.startswith("Folding")]


def test_the_note_on_folding_states_the_largest_move_of_any_form_and_model():
    frame = results({("baseline", 64): BASELINE, ("internal_aux", 64): INTERNAL, ("all", 128): [3.0, 4.0]})
    assert fold_notes(frame) == []
    columns = ["valid_ce_gated", "valid_ce_unfused", "valid_ce_fused"]
    frame.loc[3:, columns] = [[3.0, 3.0, 3.0], [2.0, 2.0, 2.0], [4.0, 4.0, 4.0], [3.0, 3.0, 3.0], [4.0, 4.0, 4.0]]
    assert fold_notes(frame) == [
        "Folding the norms away, as a fixed scale or into the next linear map, moved the loss of the 5 tapered models"
        " by at most 0.0e+00 nats/token."
    ]
    for row, column, moved, printed in [
        (4, "valid_ce_fused", 2.0 + 3e-7, "3.0e-07"),  # up, in one form
        (7, "valid_ce_unfused", 4.0 - 5e-6, "5.0e-06"),  # down, in the other, of a variant that is not printed
    ]:
        frame.loc[row, column] = moved
        assert f"the 5 tapered models by at most {printed} nats/token" in fold_notes(frame)[0]
    frame.loc[7, columns] = float("nan")  # not folded: neither counted nor compared
    assert "the 4 tapered models by at most 3.0e-07 nats/token" in fold_notes(frame)[0]


@pytest.mark.parametrize("column", ["steps", "lr", "batch", "context", "valid_tokens"])
def test_runs_that_are_not_alike_are_refused(column):
    frame = results({("baseline", 64): BASELINE, ("all_aux", 64): INTERNAL})
    frame.loc[0, column] *= 2
    with pytest.raises(UserError, match=f"at d_model 64 differ in {column}"):
        tables.table1((frame, CURVES), JOB)


def test_a_run_without_results_is_refused():
    with pytest.raises(UserError, match="run demo has no results"):
        tables.table1((results({}), CURVES), JOB)


def test_csv_keeps_every_digit(tmp_path):
    made = tables.table1((results({("baseline", 64): [3.1, 2.2, 4.3], ("all_aux", 64): INTERNAL}), CURVES), JOB)
    table.write(made, tmp_path)
    back = pd.read_csv(tmp_path / "table1.csv")
    for column in ("valid_ce_mean", "valid_ce_std", "gap_percent", "gap_low", "gap_high"):
        assert back[column].dropna().tolist() == pd.DataFrame(made.records)[column].dropna().tolist()


def test_markdown_holds_caption_rows_and_the_published_range_apart(tmp_path):
    table.write(tables.table1((results(OUTLYING), CURVES), JOB), tmp_path)
    lines = (tmp_path / "table1.md").read_text(encoding="utf-8").splitlines()
    assert lines[0].endswith("Run demo: Embedded demo, not the paper's scale.")
    grid = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in grid} == {11}
    assert len({len(line) for line in grid}) == 1
    assert grid[-1].startswith("| Kanavalau et al.")
    assert "0.7–1.5" in grid[-1]
    assert "0.8–1.8" in grid[-1]


def test_latex_is_balanced_and_every_row_has_every_column(tmp_path):
    hostile = {"run": "a_b", "caption": r"100 % of \x{y} & #1 ~ ^ $z$"}
    table.write(tables.table1((results(OUTLYING), CURVES), JOB.model_copy(update=hostile)), tmp_path)
    text = (tmp_path / "table1.tex").read_text(encoding="utf-8")
    assert text.isascii()
    assert re.findall(r"\\begin{([^}]+)}", text) == ["table*", "tabular", "minipage"]
    assert re.findall(r"\\end{([^}]+)}", text) == ["tabular", "minipage", "table*"]
    assert r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%" in text  # it never leaves the page
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    assert r"a\_b: 100 \% of \textbackslash{}x\{y\} \& \#1 \textasciitilde{} \textasciicircum{} \$z\$" in text
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    rows = [line for line in text.splitlines() if line.endswith(r" \\")]
    spans = [sum(int(n) - 1 for n in re.findall(r"multicolumn{(\d)}", row)) for row in rows]
    assert [len(re.findall(r"(?<!\\)&", row)) + span for row, span in zip(rows, spans, strict=True)] == [9] * 5
    assert text.count("\\midrule") == 2
