"""The fine-tuning figure against the curves that it summarises."""

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import synthetic_gpt2
from figure_rows import JOB, SEEDS, STEPS
from matplotlib.collections import EventCollection
from synthetic_gpt2 import METHODS, SIZES

from tapernorm.util.errors import UserError
from tapernorm_lab.config.gpt2 import METHOD_LABELS
from tapernorm_lab.report.figures import bands, finetuning, style

WINDOW, GAP_WINDOW = 7, 3  # 6 % and 2 % of 130 logged steps, made odd


def draw(sources, **changes):
    return finetuning.FIGURE_FINETUNE.draw(replace(sources.finetuning, **changes), JOB)


def raw(size, metric, method, seed):
    lines = synthetic_gpt2.metrics(size, method, seed, STEPS["finetuning"])
    return [line[metric] for line in lines if metric in line]


def smoothed(values, window):
    half = window // 2
    return [fmean(values[i - half : i + half + 1]) for i in range(half, len(values))]


@pytest.mark.parametrize("method", METHODS)
def test_losses_are_medians_of_smoothed_seeds_and_held_out_ones_are_not_smoothed(sources, method):
    frame = draw(sources).frame
    trained = bands.where(frame, size="mini", metric="ce", method=method)
    expected = np.median([smoothed(raw("mini", "ce", method, seed), WINDOW) for seed in SEEDS[:3]], axis=0)
    np.testing.assert_allclose(trained["median"][WINDOW // 2 :], expected, rtol=1e-12)
    held_out = bands.where(frame, size="mini", metric="valid_ce", method=method)
    assert held_out["step"].tolist() == [29, 59, 89, 119, 129]
    expected = np.median([raw("mini", "valid_ce", method, seed) for seed in SEEDS[:3]], axis=0)
    np.testing.assert_allclose(held_out["median"], expected)
    assert (set(trained["window"]), set(held_out["window"]), set(trained["n"])) == ({WINDOW}, {1}, {3})


def test_gaps_are_paired_by_seed_and_step(sources):
    frame = draw(sources).frame
    for metric, window in (("ce", GAP_WINDOW), ("valid_ce", 1)):
        pairs = [(raw("tiny", metric, "fakeln", seed), raw("tiny", metric, "vanilla", seed)) for seed in SEEDS[:3]]
        gaps = [[100 * (v - b) / b for v, b in zip(*pair, strict=True)] for pair in pairs]
        expected = np.median([smoothed(gap, window) for gap in gaps], axis=0)
        cell = bands.where(frame, size="tiny", metric=finetuning.GAPS[metric], method="fakeln")
        np.testing.assert_allclose(cell["median"][window // 2 :], expected, atol=1e-10)
    assert bands.where(frame, metric=bands.GAP, method="vanilla").empty


def test_the_gate_strip_holds_the_tapers_gate_and_fakelns_share(sources):
    frame = draw(sources).frame
    for method, source in (("taper", "all_aux"), ("fakeln", "fakeln")):
        cell = bands.where(frame, size="tiny", metric="gate", method=method)
        assert cell["median"].tolist() == raw("tiny", "gate", source, 0)
    assert 0 < cell["median"].iloc[100] < 0.2


def test_every_removal_is_marked_at_its_step_in_the_row_of_its_stage(sources):
    drawing = draw(sources)
    for column, size in enumerate(("tiny", "mini")):
        expected = synthetic_gpt2.removals(SIZES[size])
        found = bands.where(drawing.frame, size=size, metric="removal")
        assert dict(zip(found["site"], found["step"], strict=True)) == expected
        axes = drawing.figure.axes[3 * len(SIZES) + column]
        drawn = [c.get_positions() for c in axes.collections if isinstance(c, EventCollection)]
        stages = ("ln_2", "ln_1.qk", "ln_1.v", "ln_f")
        assert drawn == [[at for site, at in expected.items() if site.endswith(stage)] for stage in stages]
    assert [label.get_text() for label in drawing.figure.axes[6].get_yticklabels()] == ["MLP", "q, k", "v", "final"]


def test_the_figure_draws_its_frame_and_tells_methods_apart(sources):
    drawing = draw(sources)
    lines = [line.get_xydata().tolist() for axes in drawing.figure.axes for line in axes.lines]
    frame = drawing.frame[drawing.frame["metric"] != "removal"]
    cells = [cell for _, cell in frame.groupby(["size", "metric", "method"])]
    for cell in cells:
        assert cell[["step", "median"]].to_numpy(dtype=float).tolist() in lines
    assert len(lines) == len(cells) + len(SIZES)  # and the line where the gap is none
    legend = drawing.figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [METHOD_LABELS[method] for method in METHODS]
    points = [line for line in drawing.figure.axes[0].lines if line.get_linestyle() == "None"]
    assert [line.get_marker() for line in points] == [style.MARKERS[method] for method in METHODS]
    assert [axes.get_title() for axes in drawing.figure.axes[:2]] == ["GPT-2 tiny", "GPT-2 mini"]
    assert drawing.figure.axes[0].get_ylim() != drawing.figure.axes[1].get_ylim()
    assert style.METHODS["all_aux"] is style.LINES["all_aux"]


def test_what_did_not_run_leaves_its_panel_out(sources):
    curves, removals = sources.finetuning.curves, sources.finetuning.removals
    vanilla = bands.where(curves, method="vanilla").drop(columns="valid_ce")
    drawing = draw(sources, curves=vanilla, removals=removals.iloc[:0])
    assert set(drawing.frame["metric"]) == {"ce"}
    assert [axes.get_xlabel() for axes in drawing.figure.axes] == ["optimizer step"] * len(SIZES)
    frame = draw(sources, curves=curves[curves["method"] != "vanilla"]).frame
    assert set(frame["metric"]) == {"ce", "valid_ce", "gate", "removal"}  # nothing to take a gap against
    one = draw(sources, curves=bands.where(curves, size="mini", seed=0))
    assert len(one.figure.axes) == 4
    assert "percentile" not in one.caption


def moved(rows):
    shifted = rows.removals.copy()
    shifted.loc[0, "step"] += 1
    return {"removals": shifted}


def regated(rows):
    gates = rows.curves.copy()
    gates.loc[(gates["method"] == "all_aux") & (gates["step"] == 50), "gate"] += 0.01
    return {"curves": gates}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: {"curves": rows.curves.iloc[:0]}, "figure_finetune .*tapernorm finetune"),
        (moved, r"size tiny differ in when they removed transformer\.h\.0\.ln_2"),
        (regated, "size tiny differ in their gate at step 50"),
        (
            lambda rows: {"curves": rows.curves[(rows.curves["seed"] != 2) | (rows.curves["step"] % 2 == 0)]},
            r"vanilla at size tiny log ce at different steps \(seeds \[2\]",
        ),
    ],
)
def test_what_cannot_be_one_figure_is_refused(sources, change, message):
    with pytest.raises(UserError, match=message):
        draw(sources, **change(sources.finetuning))
