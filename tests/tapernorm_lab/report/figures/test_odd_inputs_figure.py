"""Figure S3 against the made-up scores, and its files against what print needs."""

import json
from statistics import fmean

import numpy as np
import pandas as pd
import pytest
import synthetic_robustness
from synthetic_robustness import LABELS, loss

from tapernorm.util.errors import UserError
from tapernorm_lab.report.figures import bands
from tapernorm_lab.report.figures import figure1_2_curves as figures
from tapernorm_lab.report.figures import odd_inputs as robustness_figure
from tapernorm_lab.report.frames import odd_inputs as robustness_rows

RUN = {"run": "cpu", "caption": "Not the paper's scale."}
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    paths = synthetic_robustness.write_run(tmp_path_factory.mktemp("run"), seeds=SEEDS)
    return robustness_rows.collect(paths, run="cpu")


def test_rows_stretch_from_their_median_to_the_worst_of_all_seeds(rows):
    frame = robustness_figure.drawn(rows, run="cpu")
    assert set(frame["d_model"]) == {48}  # the widest
    here = bands.where(frame, panel="rows", model="all", place="Python standard library")
    means = [loss("all", 48, seed, "code", "all") for seed in SEEDS]
    expected = [fmean(means), fmean(means) - 0.1, means[2] + 5.0]
    assert here[["value", "low", "high"]].iloc[0].tolist() == pytest.approx(expected)
    places = list(dict.fromkeys(bands.where(frame, panel="rows")["place"]))
    assert places[0] == "held-out text"
    assert places[-1] == "positions 64–95"
    assert "positions 0–63" not in places  # held-out text again
    assert len(places) == 5


def test_positions_are_medians_over_seeds_in_bands(rows):
    frame = robustness_figure.drawn(rows, run="cpu", d_model=48)
    here = bands.where(frame, panel="positions", model="all_aux")
    curves = [synthetic_robustness.document(48, seed)["positions"]["all_aux"] for seed in SEEDS]
    np.testing.assert_allclose(here["value"], np.median(curves, axis=0))
    np.testing.assert_allclose(here["low"], np.percentile(curves, 2.5, axis=0))
    assert here["first"].tolist() == [0, 16, 32, 48, 64, 80]
    assert here["last"].tolist() == [16, 32, 48, 64, 80, 96]
    assert set(here["n"]) == {3}


def test_the_figure_draws_its_frame_and_names_models_and_training_length(rows, tmp_path):
    drawing, frame = robustness_figure.figure_s3(rows, **RUN)
    left, right = drawing.axes
    lines = [line for line in right.get_lines() if len(line.get_xdata()) == 6]
    assert len(lines) == len(LABELS)
    baseline = bands.where(frame, panel="positions", model="baseline")
    np.testing.assert_allclose(lines[0].get_ydata(), baseline["value"])
    assert lines[0].get_xdata()[0] == 7.5  # the middle of positions 0 to 15
    assert any(line.get_xdata()[0] == 64 for line in right.get_lines() if len(line.get_xdata()) == 2)
    assert left.get_xscale() == "log"
    assert [text.get_text() for text in drawing.legends[0].get_texts()] == list(LABELS.values())
    note = drawing._supxlabel.get_text().replace("\n", " ")
    assert "Run cpu, 3 seeds." in note
    assert "trained on 64 tokens" in note
    assert "not finite" not in note
    figures.save(drawing, frame, tmp_path / "figure_S3")
    again, same = robustness_figure.figure_s3(rows, **RUN)
    figures.save(again, same, tmp_path / "again")
    for kind in ("csv", "png"):
        assert (tmp_path / f"figure_S3.{kind}").read_bytes() == (tmp_path / f"again.{kind}").read_bytes()
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "figure_S3.csv"), frame, check_dtype=False)


def test_what_is_not_finite_is_left_out_and_said_to_be(tmp_path):
    paths = synthetic_robustness.write_run(tmp_path, widths=(48,))
    document = json.loads(paths[1].read_text())
    for entry in document["scores"]:
        if (entry["model"], entry["trial"]) == ("all", "code"):
            entry["rows"] |= {"mean": None, "max": None, "nonfinite": 3}
    paths[1].write_text(json.dumps(document))
    drawing, frame = robustness_figure.figure_s3(robustness_rows.collect(paths, run="cpu"), **RUN)
    lost = bands.where(frame, panel="rows", model="all", place="Python standard library")
    assert lost[["value", "high"]].isna().all(axis=None)
    assert frame["value"].isna().sum() == 1
    assert "What is not finite is not drawn." in drawing._supxlabel.get_text().replace("\n", " ")


def test_one_seed_has_no_band_and_a_width_that_did_not_run_is_refused(tmp_path):
    rows = robustness_rows.collect(synthetic_robustness.write_run(tmp_path, seeds=(1,)), run="cpu")
    drawing, frame = robustness_figure.figure_s3(rows, **RUN, d_model=32)
    assert bands.where(frame, panel="positions")[["low", "high"]].isna().all(axis=None)
    assert "percentile" not in drawing._supxlabel.get_text()
    with pytest.raises(UserError, match="no scores at d_model 64: this run has 32, 48"):
        robustness_figure.figure_s3(rows, **RUN, d_model=64)
