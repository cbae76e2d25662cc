"""Evaluations and fine-tunes as tidy frames: every number where it came from, and back from CSV unchanged."""

import json
import math

import pandas as pd
import pytest
import synthetic_gpt2
from synthetic_gpt2 import CORPORA, METHODS, SIZES

from tapernorm.util.errors import UserError
from tapernorm_lab.report.figures import bands
from tapernorm_lab.report.frames import gpt2 as gpt2_rows

RUN = {"run": "demo"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, *synthetic_gpt2.write_run(folder, seeds=(0, 1), steps=40)


@pytest.fixture(scope="module")
def rows(run):
    _, evaluations, finetunes = run
    return gpt2_rows.collect(evaluations[::-1], finetunes, **RUN)


def test_there_is_one_row_per_size_method_seed_corpus_and_form_in_order(rows):
    assert not rows.scores.duplicated(gpt2_rows.SCORE).any()
    per_size = {"original": 1, "vanilla": 2, "fakeln": 4, "internal_aux": 4, "all_aux": 4}  # models times forms
    assert len(rows.scores) == len(SIZES) * sum(per_size.values()) * len(CORPORA)
    assert rows.scores["size"].unique().tolist() == ["tiny", "mini"]  # by parameters, not by name
    assert rows.scores["method"].unique().tolist() == ["original", *METHODS]
    assert rows.scores["corpus"].unique().tolist() == list(CORPORA)
    assert rows.scores["seed"].isna().sum() == len(SIZES) * len(CORPORA)  # the originals


def test_every_statistic_is_the_files(rows):
    found = bands.where(rows.scores, size="mini", method="fakeln", seed=1, corpus="stdlib", form="fused")
    (row,) = found.to_dict("records")
    entry = synthetic_gpt2.evaluation("mini", "fakeln", 1)["corpora"]["stdlib"]
    for over in ("rows", "tokens"):
        for name, value in entry["forms"]["fused"][over].items():
            assert row[f"{over}_{name}"] == value
    assert (row["label"], row["column"], row["rows"], row["targets"]) == ("Python standard library", "pile", 300, 38100)
    assert (row["parameters"], row["steps"], row["lr"], row["finetune_commit"]) == (4_100_000, 40, 6e-4, "a" * 40)
    assert row["bits_per_byte"] == pytest.approx(entry["forms"]["fused"]["rows"]["mean"] / math.log(2) / 3)
    worst = entry["forms"]["fused"]["worst"][0]
    assert (row["worst_row"], row["worst_ce"]) == (worst["row"], worst["ce"])


def test_an_original_has_no_fine_tune_to_tell_of(rows):
    original = bands.where(rows.scores, method="original")
    assert original[["steps", "lr", "finetune_commit", "finetune_valid_ce"]].isna().all(axis=None)
    assert set(original["form"]) == {"gated"}


def test_curves_and_removals_are_those_that_were_logged(rows):
    curve = bands.where(rows.curves, size="tiny", method="fakeln", seed=1)
    lines = synthetic_gpt2.metrics("tiny", "fakeln", 1, 40)
    assert curve["ce"].tolist() == [line["ce"] for line in lines if "ce" in line]
    assert curve["valid_ce"].dropna().tolist() == [line["valid_ce"] for line in lines if "valid_ce" in line]
    removed = bands.where(rows.removals, size="mini", seed=0)
    assert dict(zip(removed["site"], removed["step"], strict=True)) == synthetic_gpt2.removals(4)
    assert set(rows.removals["method"]) == {"fakeln"}


def test_csv_gives_back_the_same_frames(rows, tmp_path):
    gpt2_rows.write(rows, tmp_path)
    back = gpt2_rows.read(tmp_path)
    for name in ("scores", "curves", "removals"):
        pd.testing.assert_frame_equal(getattr(back, name), getattr(rows, name), check_exact=True)
    with pytest.raises(UserError, match=r"scores\.csv.*`tapernorm rows gpt2`"):
        gpt2_rows.read(tmp_path / "nowhere")


def test_a_run_without_fine_tunes_has_its_published_models(tmp_path):
    paths = [synthetic_gpt2.write_evaluation(tmp_path, "tiny", f"published_{m}", None) for m in ("fakeln", "vanilla")]
    rows = gpt2_rows.collect(paths, [], **RUN)
    assert rows.scores["method"].unique().tolist() == ["published_vanilla", "published_fakeln"]
    assert rows.curves.empty
    gpt2_rows.write(rows, tmp_path)
    back = gpt2_rows.read(tmp_path)
    pd.testing.assert_frame_equal(back.scores, rows.scores, check_exact=True)
    assert back.removals.empty


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("“It’s” — so…", '"It\'s" -- so...'),
        ("a\tb\r\n\x00\x7f", "a\\tb\\r\\n\\x00\\x7f"),
        ("back\\slash", "back\\\\slash"),
        ("é中🙂\ufffd", "\\xe9\\u4e2d\\U0001f642\\ufffd"),
        ("", ""),
    ],
)
def test_a_text_is_made_printable_in_ascii(text, printed):
    assert gpt2_rows.printable(text) == printed
    assert printed.isascii()
    assert not printed or printed.isprintable()


@pytest.mark.parametrize("limit", range(12))
def test_a_beginning_is_never_longer_than_its_limit_and_cuts_no_escape(limit):
    text = "ab\x00c中d"
    beginning = gpt2_rows.printable(text, limit)
    assert len(beginning) <= limit
    whole = [gpt2_rows.printable(text[:n], 99) for n in range(len(text) + 1)]
    assert beginning in whole


def test_not_finite_means_stay_missing_and_the_count_is_kept(tmp_path):
    document = synthetic_gpt2.evaluation("tiny", "original", None)
    found = document["corpora"]["stdlib"]["forms"]["gated"]
    found["rows"] |= {"mean": None, "trimmed_mean": None, "max": None, "std": None, "nonfinite": 2}
    found["tokens"]["mean"] = None
    found["worst"][0]["ce"] = None
    (tmp_path / "e.json").write_text(json.dumps(document))
    (row,) = bands.where(gpt2_rows.collect([tmp_path / "e.json"], [], **RUN).scores, corpus="stdlib").to_dict("records")
    assert math.isnan(row["rows_mean"])
    assert math.isnan(row["bits_per_byte"])
    assert (row["rows_nonfinite"], row["rows_median"]) == (2, found["rows"]["median"])


def test_what_is_missing_damaged_or_given_twice_is_refused(run, tmp_path):
    folder, evaluations, finetunes = run
    with pytest.raises(UserError, match="RESULT"):
        gpt2_rows.collect([], finetunes, **RUN)
    with pytest.raises(UserError, match=r"result\.json .*RESULT"):
        gpt2_rows.collect(evaluations, finetunes[1:], **RUN)
    with pytest.raises(UserError, match="size tiny, method original, seed None"):
        gpt2_rows.collect([evaluations[0], evaluations[0]], [], **RUN)
    with pytest.raises(UserError, match=r"kind 'finetune'.* 'evaluate'"):
        gpt2_rows.collect(finetunes, [], **RUN)
    with pytest.raises(UserError, match=r"missing\.json"):
        gpt2_rows.collect([folder / "missing.json"], [], **RUN)
    for place, change, message in [
        ("e", lambda d: d["corpora"]["stdlib"]["forms"]["gated"]["rows"].pop("p99_9"), r"rows\.p99_9"),
        ("u", lambda d: d["job"]["model"].update(method="sorcery"), "method 'sorcery'.* original, vanilla"),
    ]:
        document = synthetic_gpt2.evaluation("tiny", "original", None)
        change(document)
        (tmp_path / f"{place}.json").write_text(json.dumps(document))
        with pytest.raises(UserError, match=message):
            gpt2_rows.collect([tmp_path / f"{place}.json"], [], **RUN)
