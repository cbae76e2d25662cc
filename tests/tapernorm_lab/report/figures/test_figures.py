"""What every figure owes to its reader: the rows that it draws, a page that can be printed, and equal files."""

import shutil
import struct
from pathlib import Path

import matplotlib
import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
import synthetic_study
from figure_rows import CAPTION, JOB, TRIALS
from matplotlib import font_manager
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from tapernorm_lab.report.catalogue import Product
from tapernorm_lab.report.figures import figure, style
from tapernorm_lab.report.figures.study_stages import KINDS
from tapernorm_lab.report.makers import MAKERS

MADE = {  # figure -> what draws it, its source, its job
    **{name: (MAKERS[name], "pretraining", JOB) for name in ("figure1a", "figure1b", "figure2")},
    "figure_decode": (MAKERS["figure_decode"], "decoding", JOB),
    "figure_finetune": (MAKERS["figure_finetune"], "finetuning", JOB),
    "figure_S3": (MAKERS["figure_S3"], "odd_inputs", TRIALS),
    "figure_S1": (MAKERS["figure_{stage}"], "windows", synthetic_study.stage_job()),
    "figure_S2": (KINDS["scale_target"].draw, "targets", synthetic_study.stage_job()),
    "figure_spread_mine": (MAKERS["figure_spread_{stage}"], "token_scales", "mine"),
}
every = pytest.mark.parametrize("name", MADE)


def drawn(sources, name):
    draw, source, job = MADE[name]
    return draw(getattr(sources, source), job)


def test_every_kind_of_figure_is_here():
    assert {draw for draw, *_ in MADE.values()} >= {make for name, make in MAKERS.items() if name.startswith("figure")}


@every
def test_the_files_are_equal_from_equal_input_and_fit_for_print(sources, tmp_path, name):
    drawing = drawn(sources, name)
    for folder, one in (("one", drawing), ("two", drawn(sources, name))):
        figure.save(one, tmp_path / folder / name)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / place).iterdir()} for place in ("one", "two"))
    assert set(one) == {f"{name}.{kind}" for kind in Product(name, "", "", ()).kinds}
    for file in one:
        assert one[file] == two[file], file
    back = pd.read_csv(tmp_path / "one" / f"{name}.csv", keep_default_na=True)
    pd.testing.assert_frame_equal(back, drawing.frame, check_dtype=False, check_exact=True)
    width, _ = struct.unpack(">II", one[f"{name}.png"][16:24])
    assert width == round(300 * drawing.figure.get_figwidth())
    assert drawing.figure.get_figwidth() in (style.COLUMN_IN, style.PAGE_IN)
    pdf = one[f"{name}.pdf"]
    assert b"/FontFile2" in pdf
    # A packed PDF would be other bytes with another version of zlib.
    assert [word for word in (b"/Type3", b"CreationDate", b"FlateDecode") if word in pdf] == []


@every
def test_what_is_printed_is_readable_and_inside_the_page_and_the_caption_is_beside_it(sources, name):
    drawing = drawn(sources, name)
    made = drawing.figure
    with matplotlib.rc_context(style.RC):
        made.draw_without_rendering()
        texts = [text for text in made.findobj(Text) if text.get_text() and text.get_text() != "∞"]
        assert min(text.get_fontsize() for text in texts) >= 7
        (width, height), box = made.get_size_inches(), made.get_tightbbox()
    slack = 0.02  # a line's width may stand over the edge
    assert (min(box.x0, box.y0) >= -slack, box.x1 <= width + slack, box.y1 <= height + slack) == (True,) * 3
    assert min(axes.get_window_extent().height / made.dpi for axes in made.axes) > 0.25
    sentences = drawing.caption.split(". ")
    assert len(sentences) > 3
    assert not [text for text in texts if sentences[-1] in text.get_text()]
    assert drawing.caption.endswith((CAPTION, "Embedded demo.", "A trial."))


def test_a_caption_is_escaped_for_markdown_and_latex(sources, tmp_path):
    drawing = drawn(sources, "figure2")
    odd = figure.Drawing(drawing.figure, drawing.frame, "Run a_b, $x_1$ *c* `d` |e| <f> [g] 50 % \\h")
    figure.save(odd, tmp_path / "figure2")
    told = (tmp_path / "figure2.md").read_text(encoding="utf-8")
    assert told == "Run a\\_b, \\$x\\_1\\$ \\*c\\* \\`d\\` \\|e\\| \\<f> \\[g\\] 50 % \\\\h\n"
    latex = (tmp_path / "figure2.tex").read_text(encoding="utf-8").splitlines()
    assert latex[1] == "\\begin{figure}[t]"  # in a column; the control takes the page
    assert "\\includegraphics[width=\\linewidth]{figure2.pdf}" in latex
    assert "a\\_b, \\$x\\_1\\$" in latex[4]
    assert latex[4].endswith("\\label{fig:figure2}")
    assert "{figure*}" in figure.latex(drawn(sources, "figure1a"), "figure1a")


@pytest.mark.parametrize("looks", [style.LINES, style.METHODS])
def test_lines_of_one_dash_differ_in_grey_and_shapes_tell_all_apart(looks):
    grey = {n: np.dot(matplotlib.colors.to_rgb(s["color"]), (0.2126, 0.7152, 0.0722)) for n, s in looks.items()}
    for one, look in looks.items():
        for other, theirs in looks.items():
            assert one == other or look["linestyle"] != theirs["linestyle"] or abs(grey[one] - grey[other]) > 0.4
    assert len({style.MARKERS[name] for name in looks}) == len(looks)


def test_arms_and_the_ranges_behind_them_differ_without_colour():
    assert len({look["marker"] for look in style.ARMS.values()}) == len(style.ARMS)
    assert len({look.get("hatch") for look in style.RANGES.values()}) == len(style.RANGES)


def test_glyphs_are_those_that_come_with_matplotlib_whatever_the_system_has(tmp_path, monkeypatch):
    fonts = Path(matplotlib.get_data_path(), "fonts/ttf").resolve()
    other = shutil.copy(fonts / "DejaVuSansMono.ttf", tmp_path / "DejaVuSans.ttf")
    system = font_manager.FontEntry(fname=str(other), name="DejaVu Sans", size="scalable")
    known = [entry for entry in font_manager.fontManager.ttflist if entry.name != "DejaVu Sans"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [system, *known])

    def found(family):
        return Path(
            font_manager.findfont(font_manager.FontProperties(family=family), rebuild_if_missing=False)
        ).resolve()

    assert found(style.RC["font.family"]) == fonts / "DejaVuSans.ttf"
    assert found("DejaVu Sans") == other  # what the plain name finds


def test_the_last_bits_of_the_layout_reach_no_file(sources, tmp_path, monkeypatch):
    exact = ConstrainedLayoutEngine.execute
    places = []
    for number, noise in enumerate((0.0, 1e-14)):

        def noisy(engine, made, noise=noise):
            grids = exact(engine, made)
            for axes in made.axes:
                axes._set_position(axes.get_position(original=True).translated(noise, -noise), which="original")
            places.append([axes.get_position(original=True).bounds for axes in made.axes])
            return grids

        monkeypatch.setattr(ConstrainedLayoutEngine, "execute", noisy)
        figure.save(drawn(sources, "figure1a"), tmp_path / str(number) / "figure1a")
    assert places[0] != places[-1]
    for kind in ("pdf", "png"):
        assert (tmp_path / f"0/figure1a.{kind}").read_bytes() == (tmp_path / f"1/figure1a.{kind}").read_bytes()
