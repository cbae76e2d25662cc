"""The fine-tuning figure against the curves it summarises, and its files against what print needs."""

from statistics import fmean

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
import synthetic_gpt2
from matplotlib.collections import EventCollection
from matplotlib.text import Text
from synthetic_gpt2 import METHODS, SIZES

from tapernorm.util.errors import UserError
from tapernorm_lab.config.gpt2 import METHOD_LABELS
from tapernorm_lab.report.figures import (
    bands,
    style,
)
from tapernorm_lab.report.figures import (
    figure1_2_curves as figures,
)
from tapernorm_lab.report.figures import (
    finetuning as gpt2_figure,
)
from tapernorm_lab.report.frames import gpt2 as gpt2_rows

RUN = {"run": "demo", "caption": "Embedded demo: small models, not the paper's scale."}
STEPS, SEEDS = 130, (0, 1, 2)
WINDOW, GAP_WINDOW = 7, 3  # 6 % and 2 % of 130 logged steps, made odd


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return gpt2_rows.collect(*synthetic_gpt2.write_run(folder, seeds=SEEDS, steps=STEPS), run="demo")


def draw(rows, **changes):
    frames = {"curves": rows.curves, "removals": rows.removals} | changes
    return gpt2_figure.figure_finetune(frames["curves"], frames["removals"], **RUN)


def raw(size, metric, method, seed):
    return [line[metric] for line in synthetic_gpt2.metrics(size, method, seed, STEPS) if metric in line]


def smoothed(values, window):
    half = window // 2
    return [fmean(values[i - half : i + half + 1]) for i in range(half, len(values))]


@pytest.mark.parametrize("method", METHODS)
def test_losses_are_medians_of_smoothed_seeds_and_held_out_ones_are_not_smoothed(rows, method):
    _, frame = draw(rows)
    trained = bands.where(frame, size="mini", metric="ce", method=method)
    expected = np.median([smoothed(raw("mini", "ce", method, seed), WINDOW) for seed in SEEDS], axis=0)
    np.testing.assert_allclose(trained["median"][WINDOW // 2 :], expected, rtol=1e-12)
    held_out = bands.where(frame, size="mini", metric="valid_ce", method=method)
    assert held_out["step"].tolist() == [29, 59, 89, 119, 129]
    np.testing.assert_allclose(
        held_out["median"], np.median([raw("mini", "valid_ce", method, s) for s in SEEDS], axis=0)
    )
    assert (set(trained["window"]), set(held_out["window"]), set(trained["n"])) == ({WINDOW}, {1}, {3})


def test_gaps_are_paired_by_seed_and_step(rows):
    _, frame = draw(rows)
    for metric, window in (("ce", GAP_WINDOW), ("valid_ce", 1)):
        pairs = [(raw("tiny", metric, "fakeln", seed), raw("tiny", metric, "vanilla", seed)) for seed in SEEDS]
        gaps = [[100 * (v - b) / b for v, b in zip(*pair, strict=True)] for pair in pairs]
        expected = np.median([smoothed(gap, window) for gap in gaps], axis=0)
        cell = bands.where(frame, size="tiny", metric=gpt2_figure.GAPS[metric], method="fakeln")
        np.testing.assert_allclose(cell["median"][window // 2 :], expected, atol=1e-10)
    assert bands.where(frame, metric=bands.GAP, method="vanilla").empty


def test_the_gate_strip_holds_the_tapers_gate_and_fakelns_share(rows):
    _, frame = draw(rows)
    gate = bands.where(frame, size="tiny", metric="gate", method="taper")
    assert gate["median"].tolist() == raw("tiny", "gate", "all_aux", 0)
    share = bands.where(frame, size="tiny", metric="gate", method="fakeln")
    assert share["median"].tolist() == raw("tiny", "gate", "fakeln", 0)
    assert 0 < share["median"].iloc[100] < 0.2


def test_every_removal_is_marked_at_its_step_in_the_row_of_its_stage(rows):
    figure, frame = draw(rows)
    for column, size in enumerate(("tiny", "mini")):
        expected = synthetic_gpt2.removals(SIZES[size])
        found = bands.where(frame, size=size, metric="removal")
        assert dict(zip(found["site"], found["step"], strict=True)) == expected
        axes = figure.axes[3 * len(SIZES) + column]
        drawn = [c.get_positions() for c in axes.collections if isinstance(c, EventCollection)]
        stages = ("ln_2", "ln_1.qk", "ln_1.v", "ln_f")
        assert drawn == [[at for site, at in expected.items() if site.endswith(stage)] for stage in stages]
    assert [label.get_text() for label in figure.axes[6].get_yticklabels()] == ["MLP", "q, k", "v", "final"]


def test_the_figure_draws_its_frame_and_the_csv_is_the_frame(rows, tmp_path):
    figure, frame = draw(rows)
    figures.save(figure, frame, tmp_path / "figure")
    back = pd.read_csv(tmp_path / "figure.csv")
    pd.testing.assert_frame_equal(back, frame.astype(back.dtypes), check_exact=True)
    lines = [line.get_xydata().tolist() for axes in figure.axes for line in axes.lines]
    cells = [cell for _, cell in frame[frame["metric"] != "removal"].groupby(["size", "metric", "method"])]
    for cell in cells:
        assert cell[["step", "median"]].to_numpy(dtype=float).tolist() in lines
    assert len(lines) == len(cells) + len(SIZES)  # and the line where the gap is none


def test_sizes_stand_in_order_with_their_own_loss_scale(rows):
    figure, _ = draw(rows)
    assert [axes.get_title() for axes in figure.axes[:2]] == ["GPT-2 tiny", "GPT-2 mini"]
    assert figure.axes[0].get_ylim() != figure.axes[1].get_ylim()
    assert all(axes.get_xlabel() == "optimizer step" for axes in figure.axes[-2:])


def test_what_is_printed_is_labelled_readable_and_inside_the_page(rows):
    for curves in (rows.curves, bands.where(rows.curves, size="mini", seed=0)):
        figure, _ = draw(rows, curves=curves)
        figure.draw_without_rendering()
        texts = [text for text in figure.findobj(Text) if text.get_text()]
        assert min(text.get_fontsize() for text in texts) >= 7
        width, height = figure.get_size_inches()
        box = figure.get_tightbbox()
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= width
        assert box.y1 <= height
        note = figure.get_supxlabel().replace("\n", " ")
        assert note.endswith(RUN["caption"])
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        assert legend == [*(METHOD_LABELS[method] for method in METHODS), "held out"]
        seeds = "3 seeds. " if curves is rows.curves else "1 seed. "
        assert note.startswith(f"Run demo, {seeds}Lines: training loss, all methods on the same batches, each seed")
        assert "a centred mean of 7 logged steps (the gap: 3)" in note
        assert ("band: 2.5–97.5 percentile" in note) == (curves is rows.curves)
    assert len(figure.axes) == 4  # one size


def test_what_did_not_run_leaves_its_panel_out(rows):
    vanilla = bands.where(rows.curves, method="vanilla").drop(columns="valid_ce")
    figure, frame = draw(rows, curves=vanilla, removals=rows.removals.iloc[:0])
    assert set(frame["metric"]) == {"ce"}
    assert len(figure.axes) == len(SIZES)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Vanilla"]
    figure, frame = draw(rows, curves=rows.curves[rows.curves["method"] != "vanilla"])
    assert set(frame["metric"]) == {"ce", "valid_ce", "gate", "removal"}  # nothing to take a gap against


def test_methods_are_told_apart_in_grey_and_look_as_in_pre_training():
    assert list(style.METHODS) == list(METHODS)
    assert style.METHODS["all_aux"] is style.LINES["all_aux"]
    grey = {m: np.dot(matplotlib.colors.to_rgb(s["color"]), (0.2126, 0.7152, 0.0722)) for m, s in style.METHODS.items()}
    for one, look in style.METHODS.items():
        for other, theirs in style.METHODS.items():
            assert one == other or look["linestyle"] != theirs["linestyle"] or abs(grey[one] - grey[other]) > 0.4


def test_files_of_equal_input_are_equal(rows, tmp_path):
    for folder in (tmp_path / "one", tmp_path / "two"):
        figures.save(*draw(rows), folder / "figure_finetune")
    for kind in ("png", "csv"):  # in the PDF, a coordinate may be 0 here and -0 there
        one, two = (tmp_path / folder / f"figure_finetune.{kind}" for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_what_cannot_be_one_figure_is_refused(rows):
    with pytest.raises(UserError, match="needs curves of fine-tunes and there are none"):
        draw(rows, curves=rows.curves.iloc[:0])
    shifted = rows.removals.copy()
    shifted.loc[0, "step"] += 1
    with pytest.raises(UserError, match=r"size tiny differ in when they removed transformer\.h\.0\.ln_2"):
        draw(rows, removals=shifted)
    gates = rows.curves.copy()
    gates.loc[(gates["method"] == "all_aux") & (gates["step"] == 50), "gate"] += 0.01
    with pytest.raises(UserError, match="size tiny differ in their gate at step 50"):
        draw(rows, curves=gates)
    ragged = rows.curves[(rows.curves["seed"] != 2) | (rows.curves["step"] % 2 == 0)]
    with pytest.raises(UserError, match=r"vanilla at size tiny log ce at different steps \(seeds \[2\]"):
        draw(rows, curves=ragged)
