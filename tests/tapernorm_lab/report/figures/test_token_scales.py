"""The figure of the scales against the rows that it draws."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from scale_files import KEPT, NORMS, WEIGHTS, document, entry

from tapernorm.util.atomic_files import write_json
from tapernorm_lab.report.figures import figure1_2_curves as figures
from tapernorm_lab.report.figures.token_scales import figure_spread
from tapernorm_lab.report.frames import token_scales as spread_rows

TEXT = {"run": "tiny", "caption": "A trial."}


def rows_of(tmp_path, **after):
    write_json(tmp_path / "spread.json", document(**after))
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    return spread_rows.read(tmp_path / "spread.json")


def points(axes, label):
    (found,) = (c for c in axes.collections if isinstance(c, PathCollection) and c.get_label() == label)
    return found.get_offsets()


@pytest.mark.parametrize(("gone", "title"), [(True, "after: tapered"), (False, "after: trained, every norm kept")])
def test_a_control_is_not_called_tapered(tmp_path, gone, title):
    rows = rows_of(tmp_path)
    figure, _ = figure_spread(rows if gone else rows.assign(gone=False), run="mine", caption="")
    assert figure.axes[1].get_title(loc="left").startswith(title)


def test_each_panel_draws_its_form(tmp_path):
    rows = rows_of(tmp_path)
    figure, frame = figure_spread(rows, **TEXT)
    pd.testing.assert_frame_equal(frame, rows)
    for axes, (form, source) in zip(figure.axes, (("before", 0), ("after", 50)), strict=True):
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
            expected = (q["0.5"], q["0.001"], q["0.999"])
            assert drawn[place][:3] == pytest.approx(expected)
            assert drawn[place][3] == (NORMS[place] not in KEPT)
        assert axes.get_yscale() == "log"
        assert form in axes.get_title(loc="left")


def test_the_constant_is_drawn_where_the_norm_is_gone(tmp_path):
    figure, _ = figure_spread(rows_of(tmp_path), **TEXT)
    (lines,) = (found for found in figure.axes[1].collections if found.get_label() == "the constant, 1/c")
    expected = [[(i - 0.5, 1 / (0.5 + i)), (i + 0.5, 1 / (0.5 + i))] for i, n in enumerate(NORMS) if n not in KEPT]
    np.testing.assert_allclose(lines.get_segments(), expected)


def test_blocks_are_numbered_and_the_note_tells_text_norms_and_tokens(tmp_path):
    figure, rows = figure_spread(rows_of(tmp_path), **TEXT)
    labels = [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    assert dict(zip(labels, figure.axes[-1].get_xticks(), strict=True)) == {"0": 0, "1": 2, "2": 4, "final": 6}
    note = " ".join(figure._supxlabel.get_text().split())
    assert "Run tiny: 5 of 7 norms gone. 8 held-out rows of 128 tokens (stories, sha256 01)." in note
    before = rows[rows["form"] == "before"]
    most = before.loc[(before["largest"] / before["median"]).idxmax()]
    told = f"{most['piece']!r} at position {most['position']} ({most['largest'] / most['median']:.3g})"
    assert f"Largest tokens before, in multiples of the median: {told}" in note
    assert "∞" not in note
    assert note.endswith("A trial.")


@pytest.mark.parametrize("piece", [" $x_1$", "$", "\\$"])
def test_dollars_of_a_token_are_drawn_as_dollars_and_set_no_mathematics(tmp_path, piece):
    rows = rows_of(tmp_path)
    figure, _ = figure_spread(rows.assign(piece=piece), **TEXT)
    note = figure._supxlabel
    drawn, mathematics = note._preprocess_math(note.get_text())
    assert not mathematics
    assert f"Largest tokens before, in multiples of the median: {piece!r} at" in " ".join(drawn.split())
    even = drawn.count("$") % 2 == 0
    assert note._preprocess_math(drawn)[1] == (even and "\\$" not in drawn)  # the control: these would be


def test_what_is_not_finite_is_marked_and_told(tmp_path):
    figure, rows = figure_spread(rows_of(tmp_path, lost=3), **TEXT)
    assert [len([t for t in axes.texts if t.get_text() == "∞"]) for axes in figure.axes] == [0, len(NORMS)]
    assert "∞: up to 3 tokens after have no finite scale" in " ".join(figure._supxlabel.get_text().split())
    assert rows.loc[rows["form"] == "after", "largest"].isna().all()
    figures.save(figure, rows, tmp_path / "figure")


@pytest.mark.parametrize(("growth", "shared"), [(1.0, True), (1e6, False)])
def test_one_axis_serves_both_panels_unless_one_would_flatten_the_other(tmp_path, growth, shared):
    figure, _ = figure_spread(rows_of(tmp_path, growth=growth), **TEXT)
    one, other = (axes.get_ylim() for axes in figure.axes)
    assert (one == other) == shared


def test_the_csv_draws_the_same_bytes_again(tmp_path):
    figure, frame = figure_spread(rows_of(tmp_path, lost=1), **TEXT)
    figures.save(figure, frame, tmp_path / "one")
    again, frame = figure_spread(pd.read_csv(tmp_path / "one.csv"), **TEXT)
    figures.save(again, frame, tmp_path / "two")
    for kind in ("pdf", "png", "csv"):
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()
