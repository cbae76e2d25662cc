"""Figures 1 and 2 against the raw curves that they summarise."""

from statistics import fmean, median

import numpy as np
import pandas as pd
import pytest
import synthetic
from figure_rows import JOB, SEEDS, STEPS

from tapernorm.util.errors import UserError
from tapernorm_lab.config.variants import VARIANT_LABELS, VARIANTS
from tapernorm_lab.report.figures import bands, pretraining, style

WINDOW = 7  # 2 % of 300 logged steps, made odd
FIGURES = {"1a": pretraining.FIGURE1A, "1b": pretraining.FIGURE1B, "2": pretraining.FIGURE2}


def draw(sources, name, change=lambda curves: curves, job=JOB):
    results, curves = sources.pretraining
    return FIGURES[name].draw((results, change(curves)), job)


def raw(metric, variant, seed):
    """One seed's curve straight from what the trainer logs."""
    return [line[metric] for line in synthetic.metrics(variant, 128, seed, STEPS["pretraining"]) if metric in line]


def smoothed(values):
    """Means of WINDOW points around each step from the first with a whole half window before it."""
    half = WINDOW // 2
    return [fmean(values[i - half : i + half + 1]) for i in range(half, len(values))]


def percentile(values, percent):
    """Linear interpolation between the two nearest ranks."""
    ordered, rank = sorted(values), percent / 100 * (len(values) - 1)
    below = int(rank)
    return ordered[below] + (rank - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])


def heights(axes):
    """Of every curve with more than two points."""
    return [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines if len(line.get_ydata()) > 2]


@pytest.mark.parametrize("metric", ["logit_rms", "logit_max"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_lines_and_bands_are_median_and_percentiles_of_the_smoothed_seeds(sources, metric, variant):
    cell = bands.where(draw(sources, "1b").frame, metric=metric, variant=variant)
    assert cell["step"].tolist() == list(range(STEPS["pretraining"]))
    seeds = [raw(metric, variant, seed) for seed in SEEDS]
    by_step = list(zip(*map(smoothed, seeds), strict=True))
    late = cell[WINDOW // 2 :]
    np.testing.assert_allclose(late["median"], [median(v) for v in by_step], rtol=1e-12)
    np.testing.assert_allclose(late["low"], [percentile(v, 2.5) for v in by_step], rtol=1e-12)
    np.testing.assert_allclose(late["high"], [percentile(v, 97.5) for v in by_step], rtol=1e-12)
    np.testing.assert_allclose(cell["raw_median"], np.median(seeds, axis=0), rtol=1e-12)
    assert (set(cell["n"]), set(cell["window"])) == ({4}, {WINDOW})


@pytest.mark.parametrize("name", ["1b", "2"])
def test_every_row_of_the_frame_is_drawn(sources, name):
    drawing = draw(sources, name)
    lines = [line.get_xydata().tolist() for axes in drawing.figure.axes for line in axes.lines]
    edges = [
        {tuple(point) for point in collection.get_paths()[0].vertices.tolist()}
        for axes in drawing.figure.axes
        for collection in axes.collections
    ]
    cells = [cell for _, cell in drawing.frame.groupby(["metric", "variant"])]
    assert len(cells) == {"1b": 11, "2": 6}[name]
    for cell in cells:
        assert cell[["step", "median"]].to_numpy().tolist() in lines
        if cell["metric"].iloc[0] != pretraining.GATE:
            ends = {tuple(p) for side in ("low", "high") for p in cell[["step", side]].to_numpy().tolist()}
            assert any(ends <= band for band in edges)


def test_the_gate_is_drawn_as_logged_and_once_for_all_widths(sources):
    gate = bands.where(draw(sources, "2").frame, metric=pretraining.GATE)
    assert gate["median"].tolist() == raw("gate", "all", 0)
    axes = draw(sources, "1a").figure.axes
    assert [panel.get_ylabel() for panel in axes].count("gate") == 1
    (last,) = (panel for panel in axes if panel.get_ylabel() == "gate")
    assert [line.get_xdata().max() for line in last.lines] == [1.0, 1.0]  # 120 and 300 steps


def test_the_loss_gap_is_paired_by_seed_and_step(sources):
    cell = bands.where(draw(sources, "1a").frame, metric=bands.GAP, variant="internal_aux", d_model=128)
    pairs = [(raw("ce", "internal_aux", seed), raw("ce", "baseline", seed)) for seed in SEEDS]
    expected = np.median([[100 * (v - b) / b for v, b in zip(*pair, strict=True)] for pair in pairs], axis=0)
    np.testing.assert_allclose(cell["raw_median"], expected, atol=1e-12)
    swapped = np.array(raw("ce", "baseline", 1)) / raw("ce", "baseline", 0)
    assert np.abs(100 * (swapped - 1)).mean() > 3 * np.abs(expected).mean()  # other seeds saw other batches


def test_the_end_of_training_is_enlarged_and_gaps_are_numbered_at_whole_percents(sources):
    first, second, *gaps = draw(sources, "1a").figure.axes[:4]
    assert [axes.get_title() for axes in (first, second)] == ["d = 64 (1M)", "d = 128 (3M)"]
    (inset,) = second.child_axes
    for line, whole in zip(inset.lines, second.lines, strict=True):
        assert line.get_xdata().min() == 240  # the last fifth of 300 steps
        assert line.get_xydata().tolist() == whole.get_xydata()[240:].tolist()
    ticks = np.array([tick for axes in gaps for tick in axes.get_yticks()])
    assert np.array_equal(ticks, ticks.round())


def test_figure_1a_shows_every_width_and_the_others_the_widest(sources):
    assert {name: set(draw(sources, name).frame["d_model"]) for name in FIGURES} == {
        "1a": {64, 128},
        "1b": {128},
        "2": {128},
    }
    frame = draw(sources, "1a", lambda curves: curves[curves["variant"] != "baseline"]).frame
    assert set(frame["metric"]) == {"ce", pretraining.GATE}  # without a Baseline, no gap


@pytest.mark.parametrize(("seeds", "lines", "filled"), [([1], 1, 0), ([1, 2], 2, 0), ([1, 2, 3], 1, 5)])
def test_two_seeds_are_two_lines_and_one_has_no_band(sources, seeds, lines, filled):
    drawing = draw(sources, "1b", lambda curves: bands.where(curves, seed=seeds))
    axes = drawing.figure.axes[0]
    assert (len(heights(axes)), len(axes.collections)) == (5 * lines, filled)
    assert len(drawing.figure.legends[0].get_texts()) == 5
    assert ("percentile" in drawing.caption) == bool(filled)
    both = np.sort([smoothed(raw("logit_max", "baseline", seed)) for seed in seeds], axis=0)
    if lines == len(seeds):
        for found, seed in zip(heights(axes)[:lines], both, strict=True):
            np.testing.assert_allclose(found[WINDOW // 2 :], seed, rtol=1e-12)


def exploding(curves):
    """Internal-Taper's gradients grow without bound late in training."""
    grown = curves["grad_norm"] * np.exp(curves["step"] / 50)
    return curves.assign(grad_norm=grown.where(curves["variant"] == "internal", curves["grad_norm"]))


def test_curves_that_do_not_explode_have_a_panel_of_their_own_and_the_threshold_is_a_line(sources):
    whole, calm, gate = draw(sources, "2", exploding).figure.axes
    assert [len(heights(axes)) for axes in (whole, calm, gate)] == [5, 4, 1]
    assert max(map(np.max, heights(calm))) < 0.1 * max(map(np.max, heights(whole)))
    for axes in (whole, calm):
        (threshold,) = (line for line in axes.lines if len(line.get_ydata()) == 2)
        assert set(threshold.get_ydata()) == {1.0}
    legend = draw(sources, "2").figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [*VARIANT_LABELS.values(), "clipping threshold"]
    unknown = draw(sources, "2", job=JOB.model_copy(update={"clip_norm": None})).figure
    assert len(unknown.axes) == 2  # none explodes
    assert len(unknown.axes[0].lines) == 5


def test_logits_are_centred_where_all_rows_have_that(sources):
    shifted = draw(sources, "1b", lambda curves: curves.assign(logit_rms_centred=curves["logit_rms"] / 2))
    whole = draw(sources, "1b")
    assert set(shifted.frame["metric"]) == {"logit_rms_centred", "logit_max", "gate"}
    for one, other in zip(heights(shifted.figure.axes[1]), heights(whole.figure.axes[1]), strict=True):
        np.testing.assert_allclose(2 * one, other, rtol=1e-12)
    some = draw(sources, "1b", lambda curves: curves.assign(logit_rms_centred=curves["ce"].where(curves["seed"] > 1)))
    pd.testing.assert_frame_equal(some.frame, whole.frame)


def test_curves_that_overlap_are_marked_at_steps_of_their_own(sources):
    lines = [line for line in draw(sources, "1b").figure.axes[0].lines if len(line.get_ydata()) > 2]
    assert [line.get_marker() for line in lines] == [style.MARKERS[variant] for variant in VARIANTS]
    assert len({line.get_markevery() for line in lines}) == len(VARIANTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda curves: curves[(curves["seed"] != 2) | (curves["step"] % 2 == 0)],
            r"baseline at d_model 128 log grad_norm at different steps \(seeds \[2\]",
        ),
        (
            lambda curves: curves.assign(
                gate=curves["gate"] + 0.01 * ((curves["variant"] == "all") & (curves["step"] == 50))
            ),
            "d_model 128 differ in their gate at step 50",
        ),
        (lambda curves: curves.drop(columns="grad_norm"), "no step of baseline at d_model 128 logs grad_norm"),
    ],
)
def test_what_cannot_be_one_figure_is_refused(sources, change, message):
    with pytest.raises(UserError, match=message):
        draw(sources, "2", change)
