"""Tables 3 and 3x from made-up losses whose gaps are known, and the published numbers where they belong."""

import math
import re

import pandas as pd
import pytest
import synthetic_gpt2

from tapernorm.util.errors import UserError
from tapernorm_lab.config import published
from tapernorm_lab.config.gpt2 import METHOD_LABELS
from tapernorm_lab.config.jobs import ReportJob
from tapernorm_lab.experiments.loss_quantiles import RESOLUTION
from tapernorm_lab.report.frames import gpt2 as gpt2_rows
from tapernorm_lab.report.tables import table3_gpt2 as gpt2_tables

JOB = ReportJob(run="demo", caption="Embedded demo, not the paper's scale.", labels={})
LABELS = {"held_out": "web, held out", "pile": "The Pile, first rows"}
COLUMNS = {"held_out": "owt", "pile": "pile"}


def scores(losses, *, fold_shift=None, **columns):
    """A scores frame from (size, method) -> corpus -> losses by seed; a single loss is a model without a seed."""
    fixed = {
        "rows": 300,
        "targets": 38_100,
        "context": 128,
        "vocab_size": 4096,
        "origin": "a text",
        "parameters": 1_000_000,
    }
    fixed |= {"tokenizer_sha256": "t", "blocks_sha256": "b", "rows_nonfinite": 0, "worst_row": 7, "worst_text": "x|`y"}
    fixed |= {"device": "cpu", "commit": "c" * 40, "torch": "2.13.0", "rows_std": 0.5, "bytes": 114_300} | columns
    made = []
    for (size, method), corpora in losses.items():
        for corpus, by_seed in corpora.items():
            single = not isinstance(by_seed, list)
            for seed, loss in enumerate([by_seed] if single else by_seed):
                if loss is None:
                    continue
                model = {"size": size, "method": method, "seed": None if single else seed, "base": "pre-trained here"}
                kind = method.partition("_")[0] if single else "finetuned"
                tuned = {"steps": None, "lr": math.nan, "batch": None, "finetune_commit": None, "data_hash": None}
                tuned |= (
                    {}
                    if single
                    else {"steps": 160, "lr": 6e-4, "batch": 8, "finetune_commit": "d" * 40, "data_hash": "h"}
                )
                tuned["finetune_torch"] = None if single else "2.13.0"
                shifts = {"gated": 0.0} | ({} if fold_shift is None or single else {"fused": fold_shift})
                for form, shift in shifts.items():
                    mean = loss + shift
                    row = {**model, "corpus": corpus, "form": form, "kind": kind, "label": LABELS[corpus], **tuned}
                    row |= {"column": COLUMNS[corpus], "rows_mean": mean, "rows_median": mean - 0.1}
                    row |= {"rows_trimmed_mean": mean - 0.05, "rows_p99_9": mean + 1, "rows_max": mean + 2}
                    row |= {"worst_ce": mean + 2, "tokens_mean": mean, "tokens_median": mean / 2, "tokens_p99_9": 12.0}
                    made.append(fixed | row | {"bits_per_byte": mean / 2})
    return pd.DataFrame(made).astype({"seed": "Int64", "steps": "Int64"})


SEEDED = {
    ("tiny", "original"): {"held_out": 3.15, "pile": 2.0},
    ("tiny", "vanilla"): {"held_out": [3.0, 2.0, 4.0], "pile": [2.5, 2.5, 2.5]},
    ("tiny", "all_aux"): {"held_out": [3.03, 2.04, 4.06], "pile": [2.6, 2.7, 2.5]},  # 1, 2 and 1.5 %: 1.5 +- 1.242
}


def rows_of(frame):
    return gpt2_rows.Gpt2Rows(scores=frame, curves=pd.DataFrame(), removals=pd.DataFrame())


def found(losses, **columns):
    return rows_of(scores(losses, **columns))


def row_of(made, method, corpus="held_out", size="tiny"):
    (row,) = [r for r in made.records if (r["size"], r["method"], r["corpus"]) == (size, method, corpus)]
    return row


def test_a_row_states_means_spread_and_the_paired_gap():
    made = gpt2_tables.table3(found(SEEDED), JOB)
    row = row_of(made, "all_aux")
    assert [row["gap_percent"], row["gap_low"], row["gap_high"]] == pytest.approx(
        [1.5, 1.5 - 1.24206886, 1.5 + 1.24206886], abs=1e-8
    )
    assert (row["n"], row["n_pairs"], row["seeds"]) == (3, 3, "0 1 2")
    assert row["ce_mean"] == pytest.approx(9.13 / 3)
    lines = {line[1]: line for line in made.rows}
    assert lines["All-TaperLN (+aux)"][2:6] == ["160", "3", "3.0433 ± 1.0101", "1.50 [0.26, 2.74]"]
    assert lines["Vanilla"][2:6] == ["160", "3", "3.0000 ± 1.0000", "—"]
    assert [column.group for column in made.columns[4:]] == [LABELS["held_out"]] * 2 + [LABELS["pile"]] * 2


def test_the_original_is_one_model_compared_with_every_seeds_vanilla():
    made = gpt2_tables.table3(found(SEEDED), JOB)
    row = row_of(made, "original")
    assert (row["n"], row["n_pairs"]) == (1, 3)
    assert row["gap_percent"] == pytest.approx((5 + 57.5 - 21.25) / 3)
    assert row_of(made, "original", "pile")["gap_percent"] == pytest.approx(-20)
    line = made.rows[0]
    assert line[:4] == ["tiny", "Original", "—", "1"]
    assert line[-1] == "−20.00 [−20.00, −20.00]"


def test_the_gap_is_of_paired_seeds():
    losses = dict(SEEDED)
    losses["tiny", "all_aux"] = {"held_out": [3.03, None, 4.06], "pile": [2.6, None, 2.5]}
    made = gpt2_tables.table3(found(losses), JOB)
    row = row_of(made, "all_aux")
    assert (row["n_pairs"], row["gap_percent"]) == (2, pytest.approx(1.25))
    assert row["seeds"] == "0 2"


def test_without_vanilla_there_is_no_gap():
    losses = {key: value for key, value in SEEDED.items() if key[1] != "vanilla"}
    made = gpt2_tables.table3(found(losses), JOB)
    assert [line[5] for line in made.rows] == ["—", "—"]


PUBLISHED = {
    ("small", "original"): {"held_out": 3.11, "pile": 2.85},
    ("small", "vanilla"): {"held_out": [3.02], "pile": [2.86]},
    ("small", "fakeln"): {"held_out": [3.09], "pile": [2.9]},
    ("small", "published_vanilla"): {"held_out": 3.0126, "pile": 2.8511},
    ("small", "published_fakeln"): {"held_out": 3.0797 * 1.002, "pile": 2.8852},
}
GPT2_SCALE = {"vocab_size": 50_257, "context": 1024}


def test_published_numbers_stand_beside_ours_where_the_size_is_theirs():
    made = gpt2_tables.table3(found(PUBLISHED, **GPT2_SCALE), JOB)
    assert [column.header for column in made.columns[4:]] == [
        *("CE", "gap %", "published OpenWebText"),
        *("CE", "gap %", "published The Pile"),
    ]
    lines = {line[1]: line for line in made.rows}
    assert lines["Vanilla"][6] == "3.0126"
    assert lines["FakeLN"][6] == lines["FakeLN, published weights"][6] == "3.0797 (2.23)"
    assert lines["Original"][9] == "2.8450 (−0.21)"
    assert made.published == []
    row = row_of(made, "fakeln", size="small")
    assert (row["published_ce"], row["published_source"]) == (3.0797, published.TABLE3_SOURCE)
    assert row["published_gap_percent"] == pytest.approx(100 * (3.0797 / 3.0126 - 1))
    assert any("not measured here" in note for note in made.notes)


def test_published_weights_are_compared_with_their_own_vanilla():
    made = gpt2_tables.table3(found(PUBLISHED, **GPT2_SCALE), JOB)
    row = row_of(made, "published_fakeln", size="small")
    assert row["gap_percent"] == pytest.approx(100 * (3.0797 * 1.002 / 3.0126 - 1))
    assert math.isnan(row_of(made, "published_vanilla", size="small")["gap_percent"])


def test_without_a_size_of_theirs_the_published_rows_are_set_apart():
    made = gpt2_tables.table3(found(SEEDED), JOB)
    assert len(made.published) == 12
    assert made.published[0] == ["Baroni et al., small", "Original", "—", "1", "3.1006", "2.92", "2.8450", "−0.21"]
    assert made.published[11] == ["", "FakeLN", "800", "1", "2.5052", "1.02", "130.2197", "5177.82"]
    assert all(len(line) == len(made.columns) for line in [*made.rows, *made.published])
    assert any(
        note.startswith("Rows Baroni et al.: from Baroni et al. 2025, arXiv 2507.02559") and "not measured here" in note
        for note in made.notes
    )


# arXiv 2507.02559, once more: OpenWebText, The Pile, The Pile filtered, fine-tuning steps.
SOURCE = {
    ("small", "original"): (3.1006, 2.8450, 2.7899, None),
    ("small", "vanilla"): (3.0126, 2.8511, 2.8112, 300),
    ("small", "fakeln"): (3.0797, 2.8852, 2.8757, 300),
    ("medium", "original"): (2.8145, 2.5163, 2.5390, None),
    ("medium", "vanilla"): (2.7390, 2.5752, 2.5724, 500),
    ("medium", "fakeln"): (2.7642, 2.6579, 2.6352, 500),
    ("large", "original"): (2.6623, 2.5320, 2.4347, None),
    ("large", "vanilla"): (2.6240, 2.6233, 2.5074, 600),
    ("large", "fakeln"): (2.6384, 2.7504, 2.5159, 600),
    ("xl", "original"): (2.5567, 2.4436, 2.3739, None),
    ("xl", "vanilla"): (2.4799, 2.4673, 2.3821, 800),
    ("xl", "fakeln"): (2.5052, 130.2197, 2.3992, 800),
}


def test_published_numbers_are_the_sources():
    ours = {(size, method): one for size, methods in published.TABLE3.items() for method, one in methods.items()}
    assert list(ours) == list(SOURCE)
    for key, one in ours.items():
        assert (one.owt, one.pile, one.pile_filtered, one.steps) == SOURCE[key]


def test_stand_ins_and_another_scale_are_said():
    made = gpt2_tables.table3(found(SEEDED), JOB)
    assert "Stand-ins: web, held out (for OpenWebText)." in made.caption  # The Pile, first rows: is The Pile
    assert made.caption.endswith("Run demo: Embedded demo, not the paper's scale.")
    scale = [note for note in made.notes if note.startswith("The losses are not on the scale of Baroni et al.")]
    assert len(scale) == 1
    assert re.search(r"4,096 in rows of 128\..* 50,257 in rows of 1,024\.", scale[0])
    real = scores(PUBLISHED, **GPT2_SCALE).replace({"label": {LABELS["held_out"]: "OpenWebText, their split"}})
    same = gpt2_tables.table3(rows_of(real), JOB)
    assert "Stand-ins" not in same.caption
    assert not any("not on the scale" in note for note in same.notes)
    shorter = gpt2_tables.table3x(found(PUBLISHED, **(GPT2_SCALE | {"context": 512})), JOB)
    assert any("not on the scale" in note for note in shorter.notes)


def test_folding_is_reported_by_its_largest_move():
    made = gpt2_tables.table3(found(SEEDED, fold_shift=-3e-6), JOB)
    assert row_of(made, "all_aux")["folded_minus_gated"] == pytest.approx(-3e-6, rel=1e-6)
    assert row_of(made, "all_aux")["ce_mean"] == pytest.approx(9.13 / 3)  # of the gated model
    without = gpt2_tables.table3(found(SEEDED), JOB)
    assert math.isnan(row_of(without, "all_aux")["folded_minus_gated"])


def test_table_3x_prints_the_tail_of_each_model_and_corpus():
    losses = {("tiny", "vanilla"): {"held_out": [3.0], "pile": [2.0]}, ("tiny", "fakeln"): {"held_out": [3.1]}}
    made = gpt2_tables.table3x(found(losses, fold_shift=2e-7), JOB)
    assert made.rows[0] == [
        *("tiny", LABELS["held_out"], "Vanilla", "1"),
        *("3.0000", "2.900", "2.950", "4.00", "5.00"),
        *("1.500", "12.0", "1.500", "2e−07", "7", "x|`y"),
    ]
    assert [line[:3] for line in made.rows[1:]] == [["", "", "FakeLN"], ["", LABELS["pile"], "Vanilla"]]


def test_over_seeds_statistics_are_means_and_the_worst_row_is_the_worst_seeds():
    frame = scores({("tiny", "vanilla"): {"held_out": [3.0, 3.4, 3.1]}})
    frame.loc[1, ["worst_row", "worst_text"]] = [99, "seed one's"]
    row = row_of(gpt2_tables.table3x(rows_of(frame), JOB), "vanilla")
    assert row["rows_median"] == pytest.approx(9.5 / 3 - 0.1)
    assert (row["rows_max"], row["worst_row"], row["worst_text"]) == (5.4, 99, "seed one's")


def test_rows_that_are_not_finite_are_named_and_leave_no_mean():
    frame = scores({("tiny", "vanilla"): {"held_out": [3.0]}, ("tiny", "fakeln"): {"held_out": [3.1]}})
    bad = frame["method"] == "fakeln"
    frame.loc[bad, ["rows_mean", "rows_trimmed_mean", "rows_max", "worst_ce", "bits_per_byte"]] = math.nan
    frame.loc[bad, "rows_nonfinite"] = 3
    for make in (gpt2_tables.table3, gpt2_tables.table3x):
        made = make(rows_of(frame), JOB)
        assert "FakeLN, tiny, web, held out: 3 of 300 rows are not finite, so that there is no mean." in made.notes
    assert gpt2_tables.table3(rows_of(frame), JOB).rows[1][4:6] == ["not finite", "—"]
    line = gpt2_tables.table3x(rows_of(frame), JOB).rows[1]
    assert line[4:9] == ["not finite", "3.000", "—", "4.10", "—"]


def test_notes_name_code_device_learning_rate_and_rows():
    frame = scores(SEEDED)
    notes = gpt2_tables.table3(rows_of(frame), JOB).notes
    assert notes[-2] == "Peak learning rate: tiny 0.0006."
    assert notes[-1] == f"Device cpu. PyTorch 2.13.0. Code commits, not all the same (2): {'c' * 12}, {'d' * 12}."
    for text in ("web, held out", "The Pile, first rows"):
        assert f"{text}: 300 rows of 128 tokens scored. Source: a text." in notes
    frame.loc[frame["method"] == "all_aux", "finetune_commit"] = "e" * 40 + "+dirty"
    frame.loc[frame["method"] == "all_aux", "finetune_torch"] = "2.12.1"
    mixed = gpt2_tables.table3(rows_of(frame), JOB)
    assert "(2): 2.12.1, 2.13.0." in mixed.notes[-1]
    assert f"(3): {'c' * 12}, {'d' * 12}, {'e' * 12}+dirty." in mixed.notes[-1]
    assert "different code" in mixed.caption


def test_quantiles_of_tokens_are_as_exact_as_the_note_says():
    assert RESOLUTION <= 1e-4
    assert any("to within 0.01 %" in note for note in gpt2_tables.table3x(found(SEEDED), JOB).notes)


COMPARED = {
    **dict.fromkeys(("rows", "targets", "tokenizer_sha256", "blocks_sha256"), "corpus pile"),
    **dict.fromkeys(("steps", "lr", "batch"), "size tiny"),
}


@pytest.mark.parametrize("column", COMPARED)
def test_scores_that_are_not_comparable_are_refused(column):
    frame = scores(SEEDED)
    frame[column] = frame[column].astype("object")
    frame.loc[frame.index[-1], column] = 5
    for make in (gpt2_tables.table3, gpt2_tables.table3x):
        with pytest.raises(UserError, match=f"of {COMPARED[column]} differ in {column}"):
            make(rows_of(frame), JOB)


def test_no_scores_and_a_corpus_that_stands_beside_no_published_one_are_refused():
    """`evaluate --blocks web=DIR` by hand knows no columns."""
    frame = scores(SEEDED)
    frame.loc[frame["corpus"] == "pile", "column"] = "web"
    known = "owt, pile, pile_filtered"
    for given, message in (
        (frame, f"corpus pile .*'web'.* {known}"),
        (frame.iloc[:0], "run demo"),
    ):
        with pytest.raises(UserError, match=message):
            gpt2_tables.table3(rows_of(given), JOB)


def test_the_beginning_of_the_worst_row_is_shown_as_code(tmp_path):
    paths = synthetic_gpt2.write_run(tmp_path, seeds=(0, 1), steps=5)
    made = gpt2_tables.table3x(gpt2_rows.collect(*paths, run="demo"), JOB)
    assert made.rows[0][-1] == r'class \x00Odd:\n\t"quoted" -- caf\xe9 | __init__'
    assert made.columns[-1].code


def test_every_method_that_is_printed_has_a_label():
    assert {"original", "published_vanilla", "published_fakeln", *synthetic_gpt2.METHODS} == set(METHOD_LABELS)
