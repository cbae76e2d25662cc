"""Figures against the raw curves they summarise, and their files against what print needs."""

import shutil
import struct
from pathlib import Path
from statistics import fmean, median

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
import synthetic
from matplotlib import font_manager
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from tapernorm.util.errors import UserError
from tapernorm_lab.config.variants import VARIANT_LABELS, VARIANTS
from tapernorm_lab.report.figures import bands, style
from tapernorm_lab.report.figures import figure1_2_curves as figures
from tapernorm_lab.report.frames import pretraining as rows

RUN = {"run": "demo", "caption": "Embedded demo on real text: small models, short runs; not the paper's scale."}
STEPS, SEEDS = 300, (0, 1, 2, 3)
WINDOW = 7  # 2 % of 300 logged steps, made odd


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    paths = synthetic.write_run(folder, VARIANTS, (128,), SEEDS, steps=STEPS)
    paths += synthetic.write_run(folder, ("baseline", "internal_aux"), (64,), SEEDS, steps=120)
    return rows.collect(paths, run="demo")[1]


def raw(metric, variant, seed):
    """One seed's curve straight from what the trainer logs."""
    return [line[metric] for line in synthetic.metrics(variant, 128, seed, STEPS) if metric in line]


def smoothed(values):
    """Means of WINDOW points around each step from the first with a whole half window before it."""
    half = WINDOW // 2
    return [fmean(values[i - half : i + half + 1]) for i in range(half, len(values))]


def percentile(values, percent):
    """Linear interpolation between the two nearest ranks."""
    ordered, rank = sorted(values), percent / 100 * (len(values) - 1)
    below = int(rank)
    return ordered[below] + (rank - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])


@pytest.mark.parametrize("metric", ["logit_rms", "logit_max"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_lines_and_bands_are_median_and_percentiles_of_the_smoothed_seeds(curves, metric, variant):
    _, frame = figures.figure1b(curves, **RUN)
    cell = bands.where(frame, metric=metric, variant=variant)
    assert cell["step"].tolist() == list(range(STEPS))
    seeds = [raw(metric, variant, seed) for seed in SEEDS]
    by_step = list(zip(*map(smoothed, seeds), strict=True))
    late = cell[WINDOW // 2 :]
    np.testing.assert_allclose(late["median"], [median(v) for v in by_step], rtol=1e-12)
    np.testing.assert_allclose(late["low"], [percentile(v, 2.5) for v in by_step], rtol=1e-12)
    np.testing.assert_allclose(late["high"], [percentile(v, 97.5) for v in by_step], rtol=1e-12)
    np.testing.assert_allclose(cell["raw_median"], np.median(seeds, axis=0), rtol=1e-12)
    assert (set(cell["n"]), set(cell["window"])) == ({4}, {WINDOW})


@pytest.mark.parametrize("make", [figures.figure1a, figures.figure1b, figures.figure2])
def test_the_figure_draws_its_frame_and_the_csv_is_the_frame(curves, make, tmp_path):
    figure, frame = make(curves, **RUN)
    figures.save(figure, frame, tmp_path / "figure")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "figure.csv"), frame, check_dtype=False, check_exact=True)
    drawn_lines = [line.get_xydata().tolist() for axes in figure.axes for line in axes.lines]
    drawn_bands = [
        {tuple(point) for point in collection.get_paths()[0].vertices.tolist()}
        for axes in figure.axes
        for collection in axes.collections
    ]
    cells = [cell for _, cell in frame.groupby(["d_model", "metric", "variant"])]
    assert len(drawn_lines) == len(drawn_bands) == len(cells)
    for cell in cells:
        assert cell[["step", "median"]].to_numpy().tolist() in drawn_lines
        if cell["metric"].iloc[0] != figures.GATE:
            edges = {tuple(p) for side in ("low", "high") for p in cell[["step", side]].to_numpy().tolist()}
            assert any(edges <= band for band in drawn_bands)


def test_the_gate_is_drawn_as_logged(curves):
    _, frame = figures.figure2(curves, **RUN)
    gate = bands.where(frame, metric=figures.GATE)
    assert gate["median"].tolist() == raw("gate", "all", 0)
    assert 0 < gate["median"].iloc[-1] < 1e-3


def test_the_loss_gap_is_paired_by_seed_and_step(curves):
    _, frame = figures.figure1a(curves, **RUN)
    cell = bands.where(frame, metric=bands.GAP, variant="internal_aux", d_model=128)
    pairs = [(raw("ce", "internal_aux", seed), raw("ce", "baseline", seed)) for seed in SEEDS]
    expected = np.median([[100 * (v - b) / b for v, b in zip(*pair, strict=True)] for pair in pairs], axis=0)
    np.testing.assert_allclose(cell["raw_median"], expected, atol=1e-12)
    swapped = np.array(raw("ce", "baseline", 1)) / raw("ce", "baseline", 0)
    assert np.abs(100 * (swapped - 1)).mean() > 3 * np.abs(expected).mean()  # other seeds saw other batches


def test_figure_1a_shows_every_width_and_the_others_the_widest(curves):
    assert set(figures.figure1a(curves, **RUN)[1]["d_model"]) == {64, 128}
    assert set(figures.figure1b(curves, **RUN)[1]["d_model"]) == {128}
    assert set(figures.figure2(curves, **RUN, d_model=64)[1]["variant"]) == {"baseline", "internal_aux", "shared"}
    with pytest.raises(UserError, match="no curves at d_model 96: this run has 64, 128"):
        figures.figure2(curves, **RUN, d_model=96)


def test_a_width_without_baseline_has_its_loss_and_no_gap(curves):
    alone = curves[curves["variant"] != "baseline"]
    _, frame = figures.figure1a(alone, **RUN)
    assert set(frame["metric"]) == {"ce", figures.GATE}


def test_one_seed_has_a_line_and_no_band(curves):
    figure, frame = figures.figure2(bands.where(curves, seed=1), **RUN)
    main, gate = figure.axes
    assert len(main.lines) == 5
    assert not main.collections
    assert len(gate.lines) == 1
    assert frame["low"].isna().all()
    assert "One seed has no band." in figure.get_supxlabel().replace("\n", " ")


@pytest.mark.parametrize("make", [figures.figure1a, figures.figure1b, figures.figure2])
def test_what_is_printed_is_labelled_readable_and_inside_the_page(curves, make):
    figure, _ = make(curves, **RUN, labels={64: "1M", 128: "3M"})
    note = figure.get_supxlabel().replace("\n", " ")
    assert note.startswith("Run demo, 4 seeds. Line: median, band: 2.5–97.5 percentile.")
    assert note.endswith(RUN["caption"])
    assert "d = 128 (3M)" in [axes.get_title() for axes in figure.axes]
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 7
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= width
    assert box.y1 <= height


def test_lines_of_one_dash_differ_in_grey():
    assert list(style.LINES) == list(VARIANTS) == list(VARIANT_LABELS)
    grey = {v: np.dot(matplotlib.colors.to_rgb(s["color"]), (0.2126, 0.7152, 0.0722)) for v, s in style.LINES.items()}
    assert len({s["color"] for s in style.LINES.values()}) == 5
    for one, look in style.LINES.items():
        for other, theirs in style.LINES.items():
            assert one == other or look["linestyle"] != theirs["linestyle"] or abs(grey[one] - grey[other]) > 0.4


def test_files_are_print_quality_and_equal_from_equal_input(curves, tmp_path):
    for folder in (tmp_path / "one", tmp_path / "two"):
        figures.save(*figures.figure1b(curves, **RUN), folder / "figure1b")
    for kind in ("pdf", "png", "csv"):
        assert (tmp_path / "one" / f"figure1b.{kind}").read_bytes() == (
            tmp_path / "two" / f"figure1b.{kind}"
        ).read_bytes()
    png = (tmp_path / "one" / "figure1b.png").read_bytes()
    width, _ = struct.unpack(">II", png[16:24])
    assert width == round(300 * style.COLUMN_IN)
    pdf = (tmp_path / "one" / "figure1b.pdf").read_bytes()
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf
    assert b"FlateDecode" not in pdf  # packed by another version of zlib, it would be other bytes


def test_glyphs_are_those_that_come_with_matplotlib_whatever_the_system_has(tmp_path, monkeypatch):
    fonts = Path(matplotlib.get_data_path(), "fonts/ttf")
    other = shutil.copy(fonts / "DejaVuSansMono.ttf", tmp_path / "DejaVuSans.ttf")
    system = font_manager.FontEntry(fname=str(other), name="DejaVu Sans", size="scalable")
    known = [entry for entry in font_manager.fontManager.ttflist if entry.name != "DejaVu Sans"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [system, *known])

    def found(family):
        return Path(font_manager.findfont(font_manager.FontProperties(family=family), rebuild_if_missing=False))

    assert found(style.RC["font.family"]) == fonts / "DejaVuSans.ttf"
    assert found("DejaVu Sans") == other  # what the plain name finds


def test_the_last_bits_of_the_layout_reach_no_file(curves, tmp_path, monkeypatch):
    exact = ConstrainedLayoutEngine.execute
    places = []
    for number, noise in enumerate((0.0, 1e-14)):

        def noisy(engine, figure, noise=noise):
            grids = exact(engine, figure)
            for axes in figure.axes:
                axes._set_position(axes.get_position(original=True).translated(noise, -noise), which="original")
            places.append([axes.get_position(original=True).bounds for axes in figure.axes])
            return grids

        monkeypatch.setattr(ConstrainedLayoutEngine, "execute", noisy)
        figures.save(*figures.figure1a(curves, **RUN), tmp_path / str(number) / "figure1a")
    assert places[0] != places[-1]
    for kind in ("pdf", "png"):
        assert (tmp_path / f"0/figure1a.{kind}").read_bytes() == (tmp_path / f"1/figure1a.{kind}").read_bytes()


def test_seeds_logged_at_other_steps_are_refused(curves):
    ragged = curves[(curves["seed"] != 2) | (curves["step"] % 2 == 0)]
    with pytest.raises(UserError, match=r"baseline at d_model 128 log logit_rms at different steps \(seeds \[2\]"):
        figures.figure1b(ragged, **RUN)


def test_variants_on_different_schedules_are_refused(curves):
    shifted = curves.copy()
    shifted.loc[(shifted["variant"] == "all") & (shifted["step"] == 50), "gate"] += 0.01
    with pytest.raises(UserError, match="d_model 128 differ in their gate at step 50"):
        figures.figure2(shifted, **RUN)


def test_a_metric_that_was_not_logged_is_named(curves):
    with pytest.raises(UserError, match="no step of baseline at d_model 128 logs grad_norm"):
        figures.figure2(curves.drop(columns="grad_norm"), **RUN)
