"""Figures 1(a), 1(b) and 2: lines are medians over seeds, bands 2.5-97.5 percentiles, the gate runs beneath."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from tapernorm.util.atomic_files import whole_file
from tapernorm.util.errors import UserError

from ...config.variants import VARIANT_LABELS, VARIANTS
from ..frames.pretraining import JOB
from . import bands, style

GATE = "gate"
_DECIMALS = 9  # of a place in the figure, as a fraction of its size


@dataclass(frozen=True)
class Panel:
    """One quantity on one axis."""

    metric: str  # column of the curves
    label: str
    log: bool
    height: float = 1.0


LOSS = Panel("ce", "training loss\n(nats/token)", log=False)
LOSS_GAP = Panel(bands.GAP, "gap to\nBaseline (%)", log=False, height=0.7)
LOGIT_RMS = Panel("logit_rms", "logit RMS", log=False)
LOGIT_MAX = Panel("logit_max", "largest |logit|", log=True)
GRADIENT = Panel("grad_norm", "gradient norm\nbefore clipping", log=True)
# The columns of the curves that figures and claims read.
CURVES = (*JOB, "step", GATE, *(panel.metric for panel in (LOSS, LOGIT_RMS, LOGIT_MAX, GRADIENT)))


def figure1a(
    curves: pd.DataFrame, *, run: str, caption: str, labels: Mapping[int, str] | None = None
) -> tuple[Figure, pd.DataFrame]:
    """Training loss of Baseline and Internal-Taper (+aux) and their gap paired by seed, one column per width."""
    widths = sorted(int(d) for d in curves["d_model"].unique())
    pair = ("baseline", "internal_aux")
    return _figure(bands.with_gap(curves), [LOSS, LOSS_GAP], widths, pair, run, caption, labels)


def figure1b(
    curves: pd.DataFrame, *, run: str, caption: str, d_model: int | None = None, labels: Mapping[int, str] | None = None
) -> tuple[Figure, pd.DataFrame]:
    """Logit magnitude of all variants at one width, by default the widest."""
    return _figure(curves, [LOGIT_RMS, LOGIT_MAX], _one_width(curves, d_model), VARIANTS, run, caption, labels)


def figure2(
    curves: pd.DataFrame, *, run: str, caption: str, d_model: int | None = None, labels: Mapping[int, str] | None = None
) -> tuple[Figure, pd.DataFrame]:
    """Global gradient norm of all variants at one width, by default the widest."""
    return _figure(curves, [GRADIENT], _one_width(curves, d_model), VARIANTS, run, caption, labels)


def save(figure: Figure, frame: pd.DataFrame, stem: Path) -> None:
    """Write `stem`.pdf, .png and .csv; equal input gives equal files, byte for byte, at one version of matplotlib."""
    with whole_file(stem.with_suffix(".csv")) as temporary:
        frame.to_csv(temporary, index=False, lineterminator="\n")
    undated: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "png": {"Software": None}}
    with matplotlib.rc_context(style.RC), _one_date():
        figure.set_layout_engine(RoundedLayout())
        for kind, metadata in undated.items():
            with whole_file(stem.with_suffix(f".{kind}")) as temporary:
                figure.savefig(temporary, format=kind, metadata=metadata)


class RoundedLayout(ConstrainedLayoutEngine):
    """Constrained layout with the places of all axes rounded.

    The solver orders its terms by their addresses in memory, so that the last bits of a place differ between processes.
    """

    def execute(self, fig: Figure) -> Any:
        grids = super().execute(fig)
        for axes in fig.axes:
            axes.set_position(Bbox(axes.get_position(original=True).get_points().round(_DECIMALS)), which="original")
            axes.set_in_layout(True)  # set_position takes it out
        return grids


@contextmanager
def _one_date() -> Iterator[None]:
    """The date that files are to carry, by the convention of reproducible builds: embedded fonts have one too."""
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["SOURCE_DATE_EPOCH"]
        else:
            os.environ["SOURCE_DATE_EPOCH"] = before


def _one_width(curves: pd.DataFrame, d_model: int | None) -> list[int]:
    widths = sorted(int(d) for d in curves["d_model"].unique())
    if d_model is not None and d_model not in widths:
        raise UserError(f"no curves at d_model {d_model}: this run has {', '.join(map(str, widths))}")
    return [widths[-1] if d_model is None else d_model]


def drawn(
    curves: pd.DataFrame, panels: Sequence[Panel], widths: Sequence[int], variants: Sequence[str]
) -> pd.DataFrame:
    """Everything a figure draws, as rows (d_model, metric, variant, step, ...); the gate has no variant of its own."""
    parts = []
    for d_model in widths:
        cells = {v: rows for v in variants if len(rows := bands.where(curves, d_model=d_model, variant=v))}
        if not cells:
            raise UserError(f"no curves of {', '.join(variants)} at d_model {d_model}: run at least one of them")
        for metric in (panel.metric for panel in panels):
            for variant, rows in cells.items():
                if metric == bands.GAP and not bands.has(rows, metric):
                    continue  # no Baseline at this width to compare with
                band = bands.across_seeds(rows, metric)
                parts.append(band.assign(d_model=d_model, metric=metric, variant=variant))
        gate = bands.gate(pd.concat(cells.values())).rename(columns={"gate": "median"})
        parts.append(gate.assign(d_model=d_model, metric=GATE, variant="shared"))
    leading = ["d_model", "metric", "variant", "step"]
    frame = pd.concat(parts, ignore_index=True)
    return pd.DataFrame(frame, columns=[*leading, *(c for c in frame.columns if c not in leading)])


def _figure(
    curves: pd.DataFrame,
    panels: Sequence[Panel],
    widths: Sequence[int],
    variants: Sequence[str],
    run: str,
    caption: str,
    labels: Mapping[int, str] | None,
) -> tuple[Figure, pd.DataFrame]:
    frame = drawn(curves, panels, widths, variants)
    width_in = style.COLUMN_IN if len(widths) == 1 else style.PAGE_IN
    with matplotlib.rc_context(style.RC):
        heights = [panel.height for panel in panels] + [0.26]
        figure = Figure(figsize=(width_in, 1.05 + 1.4 * sum(heights)), layout="constrained")
        grid = {"height_ratios": heights}
        axes = figure.subplots(
            len(panels) + 1, len(widths), sharex="col", sharey="row", squeeze=False, gridspec_kw=grid
        )
        for column, d_model in enumerate(widths):
            here = bands.where(frame, d_model=d_model)
            size = (labels or {}).get(d_model, "")
            axes[0, column].set_title(f"d = {d_model}" + (f" ({size})" if size not in ("", str(d_model)) else ""))
            for row, panel in enumerate(panels):
                _draw_panel(axes[row, column], bands.where(here, metric=panel.metric), panel)
            _draw_gate(axes[-1, column], bands.where(here, metric=GATE))
        for row, panel in enumerate(panels):
            axes[row, 0].set_ylabel(panel.label)
        axes[-1, 0].set_ylabel("gate")
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=2)
        note = style.wrapped(_note(frame, run, caption), width_in)
        figure.supxlabel(note, x=0.01, ha="left", color="#404040", linespacing=1.25)
    return figure, frame


def _draw_panel(axes: Axes, rows: pd.DataFrame, panel: Panel) -> None:
    for variant, line in rows.groupby("variant", sort=False):
        look = style.LINES[str(variant)]
        if bands.has(line, "low"):
            axes.fill_between(
                line["step"], line["low"], line["high"], color=look["color"], alpha=style.BAND_ALPHA, linewidth=0
            )
        axes.plot(line["step"], line["median"], label=VARIANT_LABELS[str(variant)], **look)
    if panel.log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low > 30 else (1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())


def _draw_gate(axes: Axes, rows: pd.DataFrame) -> None:
    axes.fill_between(rows["step"], rows["median"], color=style.GATE["color"], alpha=0.15, linewidth=0)
    axes.plot(rows["step"], rows["median"], **style.GATE)
    axes.set(ylim=(0, 1.08), yticks=(0, 1), xlabel="optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _note(frame: pd.DataFrame, run: str, caption: str) -> str:
    """What the reader must know: run, seeds, what line and band are, the smoothing, the run's own caption."""
    lines = frame.dropna(subset=["n"])
    counts = sorted({int(n) for n in lines["n"]})
    windows = sorted({int(w) for w in lines["window"]})
    seeds = f"{counts[0]} seed{'s' if counts[0] > 1 else ''}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]} seeds"
    what = "Line: median, band: 2.5–97.5 percentile." if counts[-1] > 1 else "One seed has no band."
    parts = [f"Run {run}, {seeds}.", what]
    if windows[-1] > 1:
        span = f"{windows[0]}" if len(windows) == 1 else f"{windows[0]}–{windows[-1]}"
        parts.append(f"Each seed smoothed by a centred mean of {span} logged steps.")
    return " ".join([*parts, caption])
