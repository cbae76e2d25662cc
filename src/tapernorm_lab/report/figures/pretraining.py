"""Figures 1(a), 1(b) and 2: curves of pre-training, medians over seeds with their bands, above the gate."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tapernorm.util.errors import UserError

from ...config.jobs import ReportJob
from ...config.variants import VARIANT_LABELS, VARIANTS
from ..frames.pretraining import JOB
from . import bands, panels, style
from .figure import FigureSpec, Layout, Row

GATE = bands.GATE
LOSS, LOGIT_RMS, LOGIT_CENTRED, LOGIT_MAX, GRADIENT = "ce", "logit_rms", "logit_rms_centred", "logit_max", "grad_norm"
# The columns of the curves that figures and claims read.
CURVES = (*JOB, "step", GATE, LOSS, LOGIT_RMS, LOGIT_CENTRED, LOGIT_MAX, GRADIENT)
_STEP = "optimizer step"
_GATE_ROW = Row(panels.gate, [{"metric": GATE}], 0.65, "gate", _STEP)
_LATE = 0.8  # share of the steps after which the inset begins
_CALM = 3.0  # largest ratio of a stable variant's late median to the smallest of all variants
Found = tuple[pd.DataFrame, pd.DataFrame]  # results and curves


def drawn(curves: pd.DataFrame, metrics: Sequence[str], variants: Sequence[str], widths: Sequence[int]) -> pd.DataFrame:
    """Return the data of a figure: rows (d_model, metric, variant, step, ...). The gate has the variant "shared".

    Raises:
        UserError: no variant ran at a width, a metric was not logged, or the schedules of one width differ.
    """
    curves = bands.with_gap(curves) if bands.GAP in metrics else curves
    parts = []
    for d_model in widths:
        cells = {v: rows for v in variants if len(rows := bands.where(curves, d_model=d_model, variant=v))}
        if not cells:
            raise UserError(f"no curves of {', '.join(variants)} at d_model {d_model}: run at least one of them")
        for metric in metrics:
            for variant, rows in cells.items():
                if metric == bands.GAP and not bands.has(rows, metric):
                    continue  # no Baseline at this width to compare with
                band = bands.across_seeds(rows, metric)
                parts.append(band.assign(d_model=d_model, metric=metric, variant=variant))
        parts.append(bands.gate(pd.concat(cells.values())).assign(d_model=d_model, variant="shared"))
    return bands.joined(parts)


def _widths(curves: pd.DataFrame) -> list[int]:
    return sorted(int(d) for d in curves["d_model"].unique())


def _frame1a(found: Found, _: ReportJob) -> pd.DataFrame:
    return drawn(found[1], (LOSS, bands.GAP), ("baseline", "internal_aux"), _widths(found[1]))


def _of_widest(metrics: Callable[[pd.DataFrame], Sequence[str]], found: Found, _: ReportJob) -> pd.DataFrame:
    """Return the data of all variants at the largest width."""
    return drawn(found[1], metrics(found[1]), VARIANTS, _widths(found[1])[-1:])


def _logits(curves: pd.DataFrame) -> tuple[str, str]:
    """Return the metrics of the logits, with the RMS about each token's mean if all rows have it."""
    centred = LOGIT_CENTRED in curves and bool(curves[LOGIT_CENTRED].notna().all())
    return LOGIT_CENTRED if centred else LOGIT_RMS, LOGIT_MAX


def _layout1a(frame: pd.DataFrame, _: Found, job: ReportJob) -> Layout:
    """Lay out loss and gap of each width above one gate."""
    widths = _widths(frame)
    losses, gaps = ([{"d_model": d, "metric": metric} for d in widths] for metric in (LOSS, bands.GAP))
    rows = [
        Row(_losses, losses, 1.7, "training loss\n(nats/token)", titles=_titles(frame, job)),
        Row(_gaps, gaps, 1.6, "gap to\nBaseline (%)", _STEP),
        Row(_shared_gate, [{"metric": GATE}], 0.6, "gate", "fraction of the optimizer steps"),
    ]
    return Layout(rows, style.COLUMN_IN if len(widths) == 1 else style.PAGE_IN)


def _layout1b(frame: pd.DataFrame, _: Found, job: ReportJob) -> Layout:
    rms = frame["metric"].iloc[0]
    label = "logit RMS" if rms == LOGIT_RMS else "logit RMS about\neach token's mean"
    log = partial(_variants, log=True)
    largest = Row(log, [{"metric": LOGIT_MAX}], 1.9, "largest |logit| of the batch", titles=_titles(frame, job))
    return Layout([largest, Row(_variants, [{"metric": rms}], 1.5, label), _GATE_ROW], style.COLUMN_IN)


def _layout2(frame: pd.DataFrame, _: Found, job: ReportJob) -> Layout:
    """Lay out all variants and, if one explodes, a second panel of the stable ones."""
    draw = partial(_gradients, clip_norm=job.clip_norm)
    rows = [Row(draw, [{"metric": GRADIENT}], 1.6, "gradient norm\nbefore clipping", titles=_titles(frame, job))]
    calm = _calm(frame)
    if len(calm) < len(set(bands.where(frame, metric=GRADIENT)["variant"])):
        others = [{"metric": GRADIENT, "variant": calm}]
        rows.append(Row(partial(draw, log=False), others, 1.6, "gradient norm,\nstable variants"))
    return Layout([*rows, _GATE_ROW], style.COLUMN_IN)


def _calm(frame: pd.DataFrame) -> list[str]:
    """Return the variants whose late gradient norm is at most `_CALM` times the smallest."""
    late = _late(bands.where(frame, metric=GRADIENT))
    medians = {str(variant): np.median(rows["median"]) for variant, rows in late.groupby("variant")}
    return [variant for variant, median in medians.items() if median <= _CALM * min(medians.values())]


def _late(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the end of training."""
    return pd.DataFrame(rows[rows["step"] >= _LATE * rows["step"].max()])


def _titles(frame: pd.DataFrame, job: ReportJob) -> list[str]:
    """Return the titles of the panels, one per width."""
    sizes = {d: job.labels.get(d, "") for d in _widths(frame)}
    return [f"d = {d}" + (f" ({size})" if size not in ("", str(d)) else "") for d, size in sizes.items()]


def _variants(axes: Axes, rows: pd.DataFrame, *, log: bool = False) -> None:
    panels.curves(axes, rows, "variant", style.LINES, VARIANT_LABELS, style.MARKERS)
    panels.steps(axes)
    if log:
        axes.set_yscale("log")
        panels.log_ticks(axes.yaxis)


def _losses(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the loss, with the end of training enlarged in an inset."""
    panels.curves(axes, rows, "variant", style.LINES, VARIANT_LABELS)
    panels.steps(axes)
    inset = axes.inset_axes((0.4, 0.46, 0.6, 0.54))
    panels.curves(inset, _late(rows), "variant", style.LINES, VARIANT_LABELS)
    inset.set_xticks([])
    inset.yaxis.set_major_locator(MaxNLocator(3))
    axes.indicate_inset_zoom(inset, linewidth=0.5)


def _gaps(axes: Axes, rows: pd.DataFrame) -> None:
    panels.zero(axes)
    panels.curves(axes, bands.where(rows, variant="internal_aux"), "variant", style.LINES, VARIANT_LABELS)
    panels.steps(axes)
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True, steps=(1, 2, 5, 10)))


def _gradients(axes: Axes, rows: pd.DataFrame, *, clip_norm: float | None, log: bool = True) -> None:
    _variants(axes, rows, log=log)
    if clip_norm is not None:
        axes.axhline(clip_norm, label="clipping threshold", **style.THRESHOLD)


def _shared_gate(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the gate of every width over the fraction of its steps; equal gates are one line."""
    share = rows["step"] / rows.groupby("d_model")["step"].transform("max")
    for _, one in rows.assign(step=share).drop_duplicates(["step", "median"]).groupby("d_model"):
        panels.gate(axes, one)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter("{x:g}")


def _told(*what: str) -> Callable[[pd.DataFrame, Found, ReportJob], Iterator[str]]:
    def sentences(frame: pd.DataFrame, _: Found, job: ReportJob) -> Iterator[str]:
        yield from what
        yield f"Run {job.run}, {bands.seeds(frame)}."
        yield panels.reading(frame)
        yield job.caption

    return sentences


FIGURE1A = FigureSpec(
    _frame1a,
    _layout1a,
    _told(
        "Training loss of Baseline and Internal-Taper (+aux), and the gap between them, paired by seed and batch.",
        f"Insets: the last {100 - 100 * _LATE:g} % of the steps. Gate: 1 is the norm, 0 a constant scale.",
    ),
)
FIGURE1B = FigureSpec(
    partial(_of_widest, _logits),
    _layout1b,
    _told(
        "Logit magnitude of all variants at the widest width.",
        "Above: the largest |logit| over a batch and the vocabulary. Below: the root mean square over both.",
    ),
)
FIGURE2 = FigureSpec(
    partial(_of_widest, lambda _: (GRADIENT,)),
    _layout2,
    _told(
        "Gradient norm over all parameters before clipping, of all variants at the widest width.",
        f"Stable: a late gradient norm of at most {_CALM:g} times the smallest; shown alone where others explode.",
    ),
)
