"""The decoding figure against the benchmark that it draws, and its files against what print needs."""

import struct

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
import synthetic_bench
from matplotlib.text import Text

from tapernorm.util.errors import UserError
from tapernorm_lab.report.figures import bands, style
from tapernorm_lab.report.figures import figure1_2_curves as figures
from tapernorm_lab.report.figures.decoding import figure_decode
from tapernorm_lab.report.frames import decoding as decode_rows

RUN = {"run": "demo", "caption": "Embedded demo on real text: small models, short runs; not the paper's scale."}


def bench_of(document, folder, kind=decode_rows.DECODE):
    return decode_rows.read(synthetic_bench.write(document, folder / "bench.json"), kind=kind)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return bench_of(synthetic_bench.decode(prompts=(128, 512), rounds=9), tmp_path_factory.mktemp("decode"))


def drawn_points(axes):
    """(height, low, high) of every point of a panel, left to right."""
    points = []
    for container in axes.containers:
        line, _, bars = container
        ends = [segment[:, 1] for segment in bars[0].get_segments()] if bars else [(y, y) for y in line.get_ydata()]
        points += [(x, y, *sorted(end)) for x, y, end in zip(*line.get_data(), ends, strict=True)]
    return [point[1:] for point in sorted(points)]


def test_each_panel_draws_its_rows_of_the_csv(bench, tmp_path):
    figure, frame = figure_decode(bench, **RUN)
    figures.save(figure, frame, tmp_path / "figure")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "figure.csv"), frame, check_dtype=False, check_exact=True)
    places = [("baseline_naive", "eager"), ("baseline", "eager"), ("baseline", "compile")]
    assert len(figure.axes) == 6
    for axes, (batch, (against, mode)) in zip(figure.axes, ((b, p) for b in (1, 4) for p in places), strict=True):
        rows = bands.where(frame, against=against, mode=mode, batch=batch)
        np.testing.assert_allclose(drawn_points(axes), rows[["ratio", "low", "high"]], rtol=1e-12)
        (one,) = (line for line in axes.lines if list(line.get_xdata()) == [0, 1])
        assert list(one.get_ydata()) == [1, 1]
    for axes in figure.axes[3:]:
        assert [label.get_text() for label in axes.get_xticklabels()] == ["128", "512"]


def test_the_ratios_are_those_of_the_benchmark(bench):
    _, frame = figure_decode(bench, **RUN)
    assert set(frame["arm"]) == {"baseline_naive", "unfused", "fused", "identity"}
    for row in frame.to_dict("records"):
        (source,) = bench.where(phase="decode", **{key: row[key] for key in ("mode", "batch", "prompt", "arm")})
        name = f"ratio_{row['against']}"
        assert [row["ratio"], row["low"], row["high"]] == [source[f"{name}{end}"] for end in ("", "_low", "_high")]
        assert row["n"] == 9


def test_published_ranges_stand_only_where_mode_and_baseline_are_theirs(bench):
    figure, frame = figure_decode(bench, **RUN)
    ranges = [[(p.get_y(), p.get_y() + p.get_height()) for p in axes.patches] for axes in figure.axes]
    np.testing.assert_allclose(ranges[0], [(1.10, 1.14), (1.15, 1.18)])
    np.testing.assert_allclose(ranges[3], ranges[0])
    assert [len(r) for r in ranges] == [2, 0, 0, 2, 0, 0]
    assert set(frame.dropna(subset=["published_low"])["against"]) == {"baseline_naive"}
    assert figure.axes[0].get_title() == "eager, against\nseveral-op norm"
    assert figure.axes[1].get_title() == "eager, against\nF.rms_norm"


def test_without_eager_mode_the_ranges_are_left_out_with_the_reason(tmp_path):
    bench = bench_of(synthetic_bench.decode(("compile",), (1,), (128,), 3), tmp_path)
    figure, frame = figure_decode(bench, **RUN)
    assert frame["published_low"].isna().all()
    assert len(figure.axes) == 1
    assert "not drawn, they are of eager mode" in figure.get_supxlabel().replace("\n", " ")


def test_one_round_has_points_and_no_bars(tmp_path):
    bench = bench_of(synthetic_bench.decode(("eager",), (1,), (128,), 1), tmp_path)
    figure, _ = figure_decode(bench, **RUN)
    assert all(not axes.collections for axes in figure.axes)
    note = figure.get_supxlabel().replace("\n", " ")
    assert "1 round after" in note
    assert "bars" not in note


@pytest.mark.parametrize("modes", [("eager",), ("eager", "compile", "cudagraph")])
def test_what_is_printed_is_labelled_readable_and_inside_the_page(modes, tmp_path):
    figure, _ = figure_decode(bench_of(synthetic_bench.decode(modes, rounds=6), tmp_path), **RUN)
    note = figure.get_supxlabel().replace("\n", " ")
    assert note.startswith("Run demo: cpu, float32, 1 thread; PyTorch 2.13.0")
    assert "6 rounds after 3 untimed. Points: median of the ratio paired by round, bars: its 95 % bootstrap" in note
    assert "CUDA graph was asked for and could not be measured: no GPU." in note
    assert note.endswith(RUN["caption"])
    assert len(figure.legends[0].get_texts()) == 6
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 7
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox()
    assert (box.x0 >= 0, box.y0 >= 0, box.x1 <= width, box.y1 <= height) == (True,) * 4
    shapes = [axes.get_window_extent().height / figure.dpi for axes in figure.axes]
    assert min(shapes) > 0.7  # inches: the note has not squeezed the panels


def test_arms_differ_in_shape_and_colour():
    assert len({look["marker"] for look in style.ARMS.values()}) == len(style.ARMS)
    assert len({matplotlib.colors.to_hex(look["color"]) for look in style.ARMS.values()}) == len(style.ARMS)


def test_files_are_print_quality_and_equal_from_equal_input(bench, tmp_path):
    for folder in (tmp_path / "one", tmp_path / "two"):
        figures.save(*figure_decode(bench, **RUN), folder / "figure_decode")
    for kind in ("pdf", "png", "csv"):
        one, two = ((tmp_path / name / f"figure_decode.{kind}").read_bytes() for name in ("one", "two"))
        assert one == two
    width, _ = struct.unpack(">II", (tmp_path / "one" / "figure_decode.png").read_bytes()[16:24])
    assert width == round(300 * style.PAGE_IN)


def test_a_benchmark_that_decoded_nothing_is_refused(tmp_path):
    document = synthetic_bench.last_token((1,), (128,), 2)
    with pytest.raises(UserError, match="figure_decode needs decoding"):
        figure_decode(bench_of(document, tmp_path, decode_rows.LAST_TOKEN), **RUN)
