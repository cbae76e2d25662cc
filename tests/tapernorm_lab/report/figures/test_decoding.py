"""The decoding figure against the benchmark that it draws."""

import numpy as np
import pytest
import synthetic_bench
from figure_rows import JOB

from tapernorm.util.errors import UserError
from tapernorm_lab.report.figures import bands
from tapernorm_lab.report.figures.decoding import FIGURE_DECODE
from tapernorm_lab.report.frames import decoding


def drawing_of(document, folder, kind=decoding.DECODE):
    return FIGURE_DECODE.draw(decoding.read(synthetic_bench.write(document, folder / "b.json"), kind=kind), JOB)


def drawn_points(axes):
    """(height, low, high) of every point of a panel, left to right."""
    points = []
    for line, _, (bars,) in axes.containers:
        ends = [segment[:, 1] for segment in bars.get_segments()]
        points += [(x, y, *sorted(end)) for x, y, end in zip(*line.get_data(), ends, strict=True)]
    return [point[1:] for point in sorted(points)]


def test_each_panel_draws_its_rows_of_the_frame(sources):
    drawing = FIGURE_DECODE.draw(sources.decoding, JOB)
    places = [("baseline_naive", "eager"), ("baseline", "eager"), ("baseline", "compile")]
    panels = drawing.figure.axes
    for axes, (batch, (against, mode)) in zip(panels, ((b, p) for b in (1, 4) for p in places), strict=True):
        rows = bands.where(drawing.frame, against=against, mode=mode, batch=batch)
        np.testing.assert_allclose(drawn_points(axes), rows[["ratio", "low", "high"]], rtol=1e-12)
        (one,) = (line for line in axes.lines if list(line.get_xdata()) == [0, 1])
        assert list(one.get_ydata()) == [1, 1]
        assert axes.get_ylim() == panels[0].get_ylim()
    assert [label.get_text() for label in panels[3].get_xticklabels()] == ["128", "512"]
    assert panels[0].get_title() == "eager, against\nseveral-op norm"
    assert panels[1].get_title() == "eager, against\nF.rms_norm"


def test_the_ratios_are_those_of_the_benchmark(sources):
    frame = FIGURE_DECODE.draw(sources.decoding, JOB).frame
    assert set(frame["arm"]) == {"baseline_naive", "unfused", "fused", "identity"}
    for row in frame.to_dict("records"):
        named = {key: row[key] for key in ("mode", "batch", "prompt", "arm")}
        (source,) = sources.decoding.where(phase="decode", **named)
        name = f"ratio_{row['against']}"
        assert [row["ratio"], row["low"], row["high"]] == [source[f"{name}{end}"] for end in ("", "_low", "_high")]
        assert row["n"] == 9


def test_published_ranges_stand_only_where_mode_and_baseline_are_theirs(sources, tmp_path):
    drawing = FIGURE_DECODE.draw(sources.decoding, JOB)
    ranges = [[(p.get_y(), p.get_y() + p.get_height()) for p in axes.patches] for axes in drawing.figure.axes]
    np.testing.assert_allclose(ranges[0], [(1.10, 1.14), (1.15, 1.18)])
    np.testing.assert_allclose(ranges[3], ranges[0])
    assert [len(r) for r in ranges] == [2, 0, 0, 2, 0, 0]
    assert set(drawing.frame.dropna(subset=["published_low"])["against"]) == {"baseline_naive"}
    compiled = drawing_of(synthetic_bench.decode(("compile",), (1,), (128,), 3), tmp_path)
    assert compiled.frame["published_low"].isna().all()
    assert "not drawn" in compiled.caption
    assert "not drawn" not in drawing.caption


def test_one_round_has_points_and_no_bars(tmp_path):
    drawing = drawing_of(synthetic_bench.decode(("eager",), (1,), (128,), 1), tmp_path)
    assert all(not axes.collections for axes in drawing.figure.axes)
    assert "bars" not in drawing.caption
    assert "CUDA graph" in drawing.caption  # asked for, and not measured


def test_a_benchmark_that_decoded_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="figure_decode needs decoding"):
        drawing_of(synthetic_bench.last_token((1,), (128,), 2), tmp_path, decoding.LAST_TOKEN)
