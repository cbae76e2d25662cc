"""Figure S3 against the made-up scores."""

import json
from statistics import fmean

import numpy as np
import pytest
import synthetic_robustness
from figure_rows import TRIALS
from synthetic_robustness import LABELS, loss

from tapernorm_lab.report.figures import bands
from tapernorm_lab.report.figures.odd_inputs import FIGURE_S3
from tapernorm_lab.report.frames import odd_inputs

SEEDS = (1, 2, 3)


def test_rows_stretch_from_their_median_to_the_worst_of_all_seeds(sources):
    frame = FIGURE_S3.draw(sources.odd_inputs, TRIALS).frame
    assert set(frame["d_model"]) == {48}  # the widest
    here = bands.where(frame, panel="rows", model="all", place="Python standard library")
    means = [loss("all", 48, seed, "code", "all") for seed in SEEDS]
    expected = [fmean(means), fmean(means) - 0.1, means[2] + 5.0]
    assert here[["value", "low", "high"]].iloc[0].tolist() == pytest.approx(expected)
    places = list(dict.fromkeys(bands.where(frame, panel="rows")["place"]))
    assert (places[0], places[-1], len(places)) == ("held-out text", "positions 64–95", 5)
    assert "positions 0–63" not in places  # held-out text again


def test_positions_are_medians_over_seeds_in_bands(sources):
    here = bands.where(FIGURE_S3.draw(sources.odd_inputs, TRIALS).frame, panel="positions", model="all_aux")
    curves = [synthetic_robustness.document(48, seed)["positions"]["all_aux"] for seed in SEEDS]
    np.testing.assert_allclose(here["value"], np.median(curves, axis=0))
    np.testing.assert_allclose(here["low"], np.percentile(curves, 2.5, axis=0))
    assert here["first"].tolist() == [0, 16, 32, 48, 64, 80]
    assert here["last"].tolist() == [16, 32, 48, 64, 80, 96]
    assert set(here["n"]) == {3}


def test_the_figure_draws_its_frame_and_names_models_and_training_length(sources):
    drawing = FIGURE_S3.draw(sources.odd_inputs, TRIALS)
    left, right = drawing.figure.axes
    lines = [line for line in right.get_lines() if len(line.get_xdata()) == 6]
    assert len(lines) == len(LABELS)
    baseline = bands.where(drawing.frame, panel="positions", model="baseline")
    np.testing.assert_allclose(lines[0].get_ydata(), baseline["value"])
    assert lines[0].get_xdata()[0] == 7.5  # the middle of positions 0 to 15
    assert any(line.get_xdata()[0] == 64 for line in right.get_lines() if len(line.get_xdata()) == 2)
    assert (left.get_xscale(), right.get_xlabel()) == ("log", "position")
    assert [text.get_text() for text in drawing.figure.legends[0].get_texts()] == list(LABELS.values())
    assert "not finite" not in drawing.caption


def test_what_is_not_finite_is_left_out_and_said_to_be(tmp_path):
    paths = synthetic_robustness.write_run(tmp_path, widths=(48,), seeds=(1, 2))
    document = json.loads(paths[1].read_text())
    for entry in document["scores"]:
        if (entry["model"], entry["trial"]) == ("all", "code"):
            entry["rows"] |= {"mean": None, "max": None, "nonfinite": 3}
    paths[1].write_text(json.dumps(document))
    drawing = FIGURE_S3.draw(odd_inputs.collect(paths, run="demo"), TRIALS)
    lost = bands.where(drawing.frame, panel="rows", model="all", place="Python standard library")
    assert lost[["value", "high"]].isna().all(axis=None)
    assert drawing.frame["value"].isna().sum() == 1
    assert "not finite" in drawing.caption
