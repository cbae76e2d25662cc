"""What every figure owes to the page it is printed on."""

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text

from tapernorm_lab.report.figures import style

SMALLEST_POINTS, SLACK_IN = 7, 0.02  # a line's width may stand over the edge


def assert_printable(figure: Figure) -> None:
    """No text is smaller than the style's smallest, and nothing drawn lies outside the page."""
    with matplotlib.rc_context(style.RC):
        figure.draw_without_rendering()
        assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= SMALLEST_POINTS
        width, height = figure.get_size_inches()
        box = figure.get_tightbbox()
    assert box.x0 >= -SLACK_IN
    assert box.y0 >= -SLACK_IN
    assert box.x1 <= width + SLACK_IN
    assert box.y1 <= height + SLACK_IN
