"""How every figure looks: print sizes, colours safe for the colour-blind, dashes that tell lines apart in grey."""

from pathlib import Path
from typing import Any

import matplotlib
import seaborn
from matplotlib.font_manager import FontEntry, fontManager

COLUMN_IN, PAGE_IN = 3.4, 7.0  # print widths of one column and of the page

# Matplotlib comes with DejaVu Sans, and prefers another version of it that the system may have. Under a name of its own
# the one that comes with it is found: the same glyphs on every machine.
FONT = "Matplotlib's DejaVu Sans"
_FONT_FILE = Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")
fontManager.ttflist.append(FontEntry(fname=str(_FONT_FILE), name=FONT, size="scalable"))

_COLORS = seaborn.color_palette("colorblind").as_hex()

# A dash is (length, gap, ...) in line widths; the same variant looks the same everywhere.
LINES: dict[str, dict[str, Any]] = {
    "baseline": {"color": "#000000", "linestyle": "-"},
    "internal": {"color": _COLORS[9], "linestyle": (0, (1.2, 1))},
    "internal_aux": {"color": _COLORS[0], "linestyle": (0, (5, 1.2))},
    "all": {"color": _COLORS[1], "linestyle": "-"},
    "all_aux": {"color": _COLORS[3], "linestyle": (0, (5, 1.2, 1.2, 1.2))},
}
MARKERS = {"baseline": "o", "internal": "D", "internal_aux": "s", "all": "^", "all_aux": "v"}
MARKERS |= {"vanilla": "o", "fakeln": "D"}
# Methods of fine-tuning; a taper looks as in pre-training, and Vanilla as Baseline, which it is.
METHODS: dict[str, dict[str, Any]] = {
    "vanilla": LINES["baseline"],
    "fakeln": {"color": _COLORS[2], "linestyle": (0, (2.6, 1.1))},
    "internal_aux": LINES["internal_aux"],
    "all_aux": LINES["all_aux"],
}
# Arms of the decoding benchmark: shapes tell them apart in grey.
ARMS: dict[str, dict[str, Any]] = {
    "baseline_naive": {"color": "#000000", "marker": "D", "markersize": 2.6, "markerfacecolor": "#FFFFFF"},
    "unfused": {"color": _COLORS[1], "marker": "s", "markersize": 2.6},
    "fused": {"color": _COLORS[0], "marker": "o", "markersize": 3.2},
    "identity": {"color": "#8C8C8C", "marker": "_", "markersize": 7},
}
# Ranges that others published of such arms.
RANGES: dict[str, dict[str, Any]] = {
    "unfused": {"facecolor": _COLORS[1], "edgecolor": _COLORS[1], "hatch": "/////"},
    "fused": {"facecolor": _COLORS[0]},
}
# When a taper starts, early to late.
STARTS: tuple[dict[str, Any], ...] = tuple(
    {"color": _COLORS[color], "marker": marker, "markersize": 3.2, "linestyle": dashes, "capsize": 1.8}
    for color, marker, dashes in ((0, "o", "-"), (1, "s", (0, (5, 1.2))), (2, "D", (0, (1.2, 1))), (4, "^", "-."))
)
# Single runs of many arms: shapes and fillings tell them apart in grey.
POINTS: tuple[dict[str, Any], ...] = tuple(
    {"color": _COLORS[color], "marker": marker, "markersize": 4, "linestyle": "none", "markerfacecolor": filling}
    for filling, marks in (
        (None, ((0, "o"), (1, "s"), (2, "D"), (3, "^"), (4, "v"), (5, "P"))),
        ("#FFFFFF", ((7, "o"), (9, "s"), (6, "D"))),
    )
    for color, marker in marks
)
HELD_OUT: dict[str, Any] = {"linestyle": "none", "markersize": 3.2, "markerfacecolor": "#FFFFFF"}
THRESHOLD: dict[str, Any] = {"color": "#595959", "linewidth": 0.8, "linestyle": (0, (1, 2.5))}
GATE = {"color": "#595959", "linewidth": 0.9}
BAND_ALPHA = 0.18

RC: dict[Any, Any] = {
    "font.family": FONT,
    "font.size": 7,
    "axes.labelsize": 7,
    "axes.titlesize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "lines.linewidth": 1.1,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "ytick.minor.size": 1.5,
    "ytick.minor.width": 0.4,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "legend.columnspacing": 1.4,
    "legend.labelspacing": 0.3,
    "pdf.fonttype": 42,  # embedded TrueType: text stays text
    "pdf.compression": 0,  # by the zlib of the system, which is not the same everywhere
    "savefig.dpi": 300,
}
