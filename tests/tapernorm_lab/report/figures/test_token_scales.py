"""The figure of the scales against the rows that it draws."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from own_runs import write_run
from scale_files import KEPT, NORMS, document, entry

from tapernorm.util.atomic_files import write_json
from tapernorm_lab.report.figures.token_scales import FIGURE_SPREAD
from tapernorm_lab.report.frames import own_models


def draw(found, **changes):
    return FIGURE_SPREAD.draw(replace(found, spread=found.spread.assign(**changes)), "mine")


def points(axes, label):
    (found,) = (c for c in axes.collections if isinstance(c, PathCollection) and c.get_label() == label)
    return found.get_offsets()


def with_scales(folder, **after):
    """A taper whose scales after it are these."""
    write_run(folder, after=3.0)
    write_json(folder / "spread.json", document(**after))
    return own_models.collect({"mine": folder}, run="tiny", caption="A trial.")


@pytest.mark.parametrize(("changes", "title"), [({}, "tapered"), ({"gone": False}, "trained, every norm kept")])
def test_a_control_is_not_called_tapered(sources, changes, title):
    assert draw(sources.token_scales, **changes).figure.axes[1].get_title().startswith(f"after: {title}")


def test_each_panel_draws_its_form(sources):
    drawing = draw(sources.token_scales)
    pd.testing.assert_frame_equal(drawing.frame, sources.token_scales.spread_of("mine"))
    for axes, (form, source) in zip(drawing.figure.axes, (("before", 0), ("after", 50)), strict=True):
        mine = [entry(i + source) for i in range(len(NORMS))]
        places = np.arange(len(NORMS))
        first = points(axes, "position 0, median of rows")
        np.testing.assert_allclose(first, np.c_[places, [one["first"] for one in mine]])
        largest = points(axes, "largest token at a later position")
        np.testing.assert_allclose(largest, np.c_[places, [one["worst"][0]["scale"] for one in mine]])
        drawn = {}
        for container in axes.containers:
            line, _, (bars,) = container
            for x, y, segment in zip(*line.get_data(), bars.get_segments(), strict=True):
                drawn[int(x)] = (y, *segment[:, 1], container.get_label().startswith("norm gone"))
        for place, one in enumerate(mine):
            q = one["quantiles"]
            assert drawn[place][:3] == pytest.approx((q["0.5"], q["0.001"], q["0.999"]))
            assert drawn[place][3] == (NORMS[place] not in KEPT)
        assert axes.get_yscale() == "log"
        assert axes.get_title().startswith(form)
    (lines,) = (found for found in axes.collections if found.get_label() == "the constant, 1/c")
    expected = [[(i - 0.5, 1 / (0.5 + i)), (i + 0.5, 1 / (0.5 + i))] for i, n in enumerate(NORMS) if n not in KEPT]
    np.testing.assert_allclose(lines.get_segments(), expected)


def test_blocks_are_numbered_and_the_caption_tells_text_norms_and_tokens(sources):
    drawing = draw(sources.token_scales)
    axes, rows = drawing.figure.axes[-1], drawing.frame
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert dict(zip(labels, axes.get_xticks(), strict=True)) == {"0": 0, "1": 2, "2": 4, "final": 6}
    assert "5 of 7 norms gone. 8 held-out rows of 128 tokens (stories, sha256 01)." in drawing.caption
    before = rows[rows["form"] == "before"]
    most = before.loc[(before["largest"] / before["median"]).idxmax()]
    told = f"{most['piece']!r} at position {most['position']} ({most['largest'] / most['median']:.3g})"
    assert f"Largest tokens before, in multiples of the median: {told}" in drawing.caption
    assert "∞" not in drawing.caption


def test_what_is_not_finite_is_marked_and_told(tmp_path):
    drawing = draw(with_scales(tmp_path / "run", lost=3))
    marks = [len([t for t in axes.texts if t.get_text() == "∞"]) for axes in drawing.figure.axes]
    assert marks == [0, len(NORMS)]
    assert "∞: up to 3 tokens after" in drawing.caption
    assert drawing.frame.loc[drawing.frame["form"] == "after", "largest"].isna().all()


@pytest.mark.parametrize(("growth", "shared"), [(1.0, True), (1e6, False)])
def test_one_axis_serves_both_panels_unless_one_would_flatten_the_other(tmp_path, growth, shared):
    one, other = (axes.get_ylim() for axes in draw(with_scales(tmp_path / "run", growth=growth)).figure.axes)
    assert (one == other) == shared
