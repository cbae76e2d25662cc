"""Rows of a stage against the result files that they come from; no seed is lost, a diverged one least of all."""

import json
import re

import pandas as pd
import pytest
from synthetic_study import LOSSES, SEEDS, stage_job, write_stage

from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json
from tapernorm_lab.cli.main import main
from tapernorm_lab.report.frames import study_stages as study_rows


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    write_stage(folder)
    return folder


@pytest.fixture(scope="module")
def rows(results):
    return study_rows.collect(stage_job(), results)


def row_of(rows, arm, seed):
    (row,) = rows[(rows["arm"] == arm) & (rows["seed"] == seed)].to_dict("records")
    return row


def test_every_arm_and_seed_has_its_row_in_order(rows):
    assert rows[["arm", "seed"]].to_numpy().tolist() == [[arm, seed] for arm in LOSSES for seed in SEEDS]
    for arm, by_seed in LOSSES.items():
        for seed, loss in by_seed.items():
            found = row_of(rows, arm, seed)["valid_ce"]
            assert pd.isna(found) if loss is None else found == loss


def test_a_diverged_run_says_when_and_why(rows):
    row = row_of(rows, "wild", 3)
    assert (row["outcome"], row["diverged_at"], row["reason"]) == ("diverged", 21, "the cross-entropy is not finite")
    assert pd.isna(row["parameters"])
    assert pd.isna(row["taper_start_jump"])
    assert (row["start_fraction"], row["end_fraction"]) == (0.3, 0.5)
    whole = row_of(rows, "wild", 2)
    assert (whole["outcome"], whole["valid_ce"]) == ("finished", 2.1)
    assert pd.isna(whole["diverged_at"])
    assert pd.isna(whole["reason"])


def test_settings_come_from_the_job_that_ran(rows):
    assert (row_of(rows, "slow", 1)["lr"], row_of(rows, "baseline", 1)["lr"]) == (0.0015, 0.003)
    assert row_of(rows, "later", 1)["end_fraction"] == 0.7
    assert pd.isna(row_of(rows, "baseline", 1)["end_fraction"])
    assert row_of(rows, "relative", 2)["variant"] == "all_relative"
    assert row_of(rows, "tempered", 2)["treatment"] == '{"temperature":true}'
    assert row_of(rows, "later", 2)["taper_start_jump"] == 0.02
    assert pd.isna(row_of(rows, "papers", 2)["taper_start_jump"])  # a run of the paper's tables measures none


def test_rows_read_back_as_they_were(rows, tmp_path):
    study_rows.write(rows, tmp_path / "study_S1.csv")
    again = study_rows.read(tmp_path / "study_S1.csv", stage_job())
    pd.testing.assert_frame_equal(again, rows)
    assert not (tmp_path / "study_S1.csv").read_text().count(",nan")


def test_a_result_of_another_job_is_refused(results, tmp_path):
    job = stage_job()
    runs = (job.runs[0].model_copy(update={"config_hash": "other"}), *job.runs[1:])
    with pytest.raises(UserError, match=r"hash baseline1, .*arm baseline .*other"):
        study_rows.collect(job.model_copy(update={"runs": runs}), results)
    with pytest.raises(UserError, match=r"result\.json"):
        study_rows.collect(job, tmp_path)


def test_rows_of_other_runs_than_the_configs_are_refused(rows, tmp_path):
    study_rows.write(rows, tmp_path / "rows.csv")
    job, last = stage_job(), stage_job().runs[-1]
    for changes in (
        {"runs": job.runs[:-1]},
        {"runs": (*job.runs[:-1], last.model_copy(update={"config_hash": "x"}))},
        {"run": "other"},
        {"stage": job.stage.model_copy(update={"name": "S2"})},
    ):
        with pytest.raises(UserError, match=r"relative of S1, run demo"):
            study_rows.read(tmp_path / "rows.csv", job.model_copy(update=changes))


def test_the_verb_gathers_and_then_needs_the_rows_alone(results, tmp_path, capsys):
    job = ["--job", canonical_json(stage_job())]
    assert main(["rows", "study_S1", *job, "--results", str(results), "--out", str(tmp_path / "tables")]) == 0
    for what in ("table", "figure"):
        made = ["--results", str(tmp_path), "--out", str(tmp_path)]
        assert main([what, f"{what}_S1", *job, *made]) == 0
    made = {path.name for path in tmp_path.iterdir()}
    assert {f"table_S1.{kind}" for kind in ("csv", "md", "tex", "html")} <= made
    assert {f"figure_S1.{kind}" for kind in ("csv", "pdf", "png")} <= made
    capsys.readouterr()
    assert main(["table", "table_S1", *job, "--results", str(results), "--out", str(tmp_path)]) == 2
    assert re.search(r"study_S1\.csv .*`tapernorm rows study_STAGE`", capsys.readouterr().err)
    assert main(["table", "table_S2", *job, "--results", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert re.search("table_S2 .*stage S2.*stage S1", capsys.readouterr().err)


def test_a_run_without_the_scale_loss_has_no_target_and_one_without_a_taper_no_end(tmp_path):
    job = write_stage(tmp_path)
    for run in job.runs:  # the result of a run tells its target whether or not a loss held to it
        path = tmp_path / run.folder / "result.json"
        document = json.loads(path.read_text())
        if document["job"].get("pretrain", document["job"])["taper"] and "diverged" not in document:
            document["scale_target"] = 3.0
            if run.arm == "later":
                document["job"]["pretrain"]["taper"]["anchor_weight"] = 0.0
            path.write_text(json.dumps(document))
    arms = tuple(arm.model_copy(update={"taper": "none"}) if arm.name == "wild" else arm for arm in job.stage.arms)
    rows = study_rows.collect(
        job.model_copy(update={"stage": job.stage.model_copy(update={"arms": arms})}),
        tmp_path,
    )
    assert pd.isna(row_of(rows, "later", 1)["scale_target"])
    assert row_of(rows, "relative", 1)["scale_target"] == 3.0
    wild = row_of(rows, "wild", 2)
    assert (wild["start_fraction"], wild["scale_target"]) == (0.3, 3.0)
    assert pd.isna(wild["end_fraction"])
    assert row_of(rows, "later", 1)["end_fraction"] == 0.7


def test_the_verb_draws_what_the_stage_asks_for(results, tmp_path, capsys):
    csv = tmp_path / "tables/study_S1.csv"
    study_rows.write(study_rows.collect(stage_job(), results), csv)

    def draw(figure):
        job = stage_job()
        stage = job.stage.model_copy(update={"figure": figure})
        given = canonical_json(job.model_copy(update={"stage": stage}))
        return main(["figure", "figure_S1", "--job", given, "--results", str(tmp_path), "--out", str(tmp_path)])

    assert draw("window") == 0
    assert "gap_low" in (tmp_path / "figure_S1.csv").read_text()
    assert draw(None) == 2
    assert "stage S1 has no figure: its setting `figure` is null" in capsys.readouterr().err
    assert draw("scale_target") == 0
    assert "scale_target" in (tmp_path / "figure_S1.csv").read_text()


def test_a_damaged_result_is_named(results, tmp_path):
    job = write_stage(tmp_path)
    path = tmp_path / job.runs[3].folder / "result.json"
    document = json.loads(path.read_text())
    document["values"].pop("valid_ce")
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"seed1/result\.json .*values\.valid_ce"):
        study_rows.collect(job, tmp_path)
