"""Scores on odd inputs as tidy frames: every number where it came from, and back from CSV unchanged."""

import json

import pandas as pd
import pytest
import synthetic_robustness
from synthetic_robustness import LABELS, TRIALS

from tapernorm.util.errors import UserError
from tapernorm_lab.report.figures import bands
from tapernorm_lab.report.frames import odd_inputs as robustness_rows

PARTS = sum(len(parts) for _, _, parts in TRIALS.values())


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return synthetic_robustness.write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def rows(paths):
    return robustness_rows.collect(paths[::-1], run="cpu")


def test_there_is_one_row_per_width_seed_model_trial_and_part(rows):
    assert not rows.scores.duplicated(["d_model", "seed", "model", "trial", "part"]).any()
    assert len(rows.scores) == 3 * PARTS * (len(LABELS) + 3)  # one model less at the smaller width
    assert rows.scores["d_model"].is_monotonic_increasing
    assert set(rows.scores["run"]) == {"cpu"}
    assert len(rows.trials) == PARTS
    assert len(rows.positions) == 3 * 6 * (len(LABELS) + 3)


def test_every_statistic_is_the_files(rows):
    (row,) = bands.where(rows.scores, d_model=48, seed=2, model="all", trial="code", part="all").to_dict("records")
    entry = synthetic_robustness.score("all", 48, 2, "code", "all")
    for over in ("rows", "tokens"):
        for name, value in entry[over].items():
            assert row[f"{over}_{name}"] == value
    for name, value in entry["beside_baseline"].items():
        assert row[name] == value
    assert (row["label"], row["parameters"], row["worst_row"], row["torch"]) == ("All-Taper", 4800, 9, "2.13.0")
    assert row["worst_text"] == 'class \\x00Odd:\\n\\t"quoted" -- caf\\xe9 x = 1\\nx ='
    assert row["weights_sha256"] == "a" * 12
    baseline = bands.where(rows.scores, model="baseline")
    assert baseline[["excess_max", "blown", "baseline_blown"]].isna().all(axis=None)
    (trial,) = bands.where(rows.trials, trial="rare", part="after").to_dict("records")
    assert (trial["first"], trial["last"], trial["rows"], trial["context"]) == (23, 64, 200, 64)
    last = bands.where(rows.positions, d_model=48, seed=2, model="all", first=80)
    assert last["ce"].tolist() == [synthetic_robustness.document(48, 2)["positions"]["all"][5]]
    assert last["last"].tolist() == [96]


def test_what_is_not_finite_is_missing_and_counted(tmp_path):
    document = synthetic_robustness.document(32, 1)
    entry = document["scores"][-1]
    entry["rows"] |= {"mean": None, "max": None, "nonfinite": 4}
    document["positions"]["all_aux"][3] = None
    (tmp_path / "one.json").write_text(json.dumps(document))
    rows = robustness_rows.collect([tmp_path / "one.json"], run="cpu")
    (row,) = bands.where(rows.scores, model="all_aux", trial="longer", part="to_96").to_dict("records")
    assert pd.isna(row["rows_mean"])
    assert row["rows_nonfinite"] == 4
    assert rows.positions["ce"].isna().sum() == 1


def test_rows_come_back_from_csv_as_they_were_and_only_for_their_run(rows, tmp_path):
    robustness_rows.write(rows, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"study_S3{x}.csv" for x in ("", "_trials", "_positions")}
    back = robustness_rows.read(tmp_path, run="cpu")
    for name in ("scores", "trials", "positions"):
        pd.testing.assert_frame_equal(getattr(back, name), getattr(rows, name))
    with pytest.raises(UserError, match="run cpu, not 'demo'"):
        robustness_rows.read(tmp_path, run="demo")
    (tmp_path / "study_S3_trials.csv").unlink()
    with pytest.raises(UserError, match=r"study_S3_trials\.csv.*`tapernorm rows study_S3`"):
        robustness_rows.read(tmp_path, run="cpu")


def test_files_that_cannot_stand_beside_one_another_are_refused(paths, tmp_path):
    with pytest.raises(UserError, match="RESULT"):
        robustness_rows.collect([], run="cpu")
    twice = tmp_path / "twice.json"
    twice.write_text(paths[0].read_text())
    with pytest.raises(UserError, match="d_model 32, seed 1"):
        robustness_rows.collect([*paths, twice], run="cpu")
    other = synthetic_robustness.document(32, 9)
    other["trials"]["code"]["rows_sha256"] = "f" * 64
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="not comparable"):
        robustness_rows.collect([*paths, tmp_path / "other.json"], run="cpu")
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps({"schema_version": 1, "kind": "evaluate"}))
    with pytest.raises(UserError, match=r"kind 'evaluate'.* 'robustness'"):
        robustness_rows.collect([damaged], run="cpu")
