"""The scales of a finished taper: one row per norm, in the order of the forward pass, and form (before, after)."""

from pathlib import Path
from typing import Any

import pandas as pd

from ..engine import statistics as stats
from ..engine.frame import Field, Frame, integer, number, text
from ..read_json import read_of_run, value_at

KIND = "spread"
FORMS = ("before", "after")
QUANTILES = {"p0_1": "0.001", "p5": "0.05", "median": "0.5", "p95": "0.95", "p99": "0.99", "p99_9": "0.999"}
FRAME = Frame(
    file="spread.csv",
    key=("norm", "place", "form", "label"),
    verb="rows tapers",
    quoted=True,
    fields={
        "norm": text(),
        "place": integer(),
        "gone": Field("flag"),
        "constant": number(),  # 1 / c
        "form": text(),
        **{name: number() for name in ("first", *QUANTILES, "largest")},
        "piece": text(),
        **{name: integer() for name in ("position", "nonfinite", "rows", "context")},
        "text": text(),
        "label": text(),
    },
)


def read(path: Path) -> pd.DataFrame:
    """Read the scales that `tapernorm rows tapers` measured in a run folder.

    Columns: norm, place (0, 1, … in the order of the forward pass), gone (tapered), constant (1 / c, which replaces the
    scale of every token), form, first (median at position 0), the quantiles over later positions, largest and its token
    (piece, position), nonfinite (tokens without a finite scale), and the measured rows, context and text. A number that
    is not finite is NaN.

    Raises:
        UserError: the file is missing or of another kind, or was computed from other weights.
    """
    document = read_of_run(path.parent, path.name, KIND)
    shared = {key: value_at(document, key, path) for key in ("rows", "context", "text")}
    rows = [
        {"norm": entry["norm"], "place": place, **_constant(entry["c"]), "form": form, **_scales(entry[form]), **shared}
        for place, entry in enumerate(value_at(document, "norms", path))
        for form in FORMS
    ]
    return FRAME.typed(rows)


def _constant(c: float | None) -> dict[str, Any]:
    return {"gone": c is not None, "constant": stats.NAN if c is None else 1 / c}


def _scales(entry: dict[str, Any]) -> dict[str, Any]:
    largest = entry["worst"][0]
    numbers = {"first": entry["first"], **{name: entry["quantiles"][q] for name, q in QUANTILES.items()}}
    numbers["largest"] = largest["scale"]
    return {
        **{name: stats.NAN if value is None else value for name, value in numbers.items()},
        "piece": largest["piece"],
        "position": largest["position"],
        "nonfinite": entry["nonfinite"],
    }
