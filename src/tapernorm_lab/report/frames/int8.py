"""Losses of a run's finished models with int8 weights and bfloat16 activations, as rows: one per model."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from tapernorm.util.errors import UserError

from ...config.variants import Variant
from ..engine.frame import PROVENANCE, Frame, integer, number, text
from .pretraining import JOB, trained_and_folded

LOSSES = ("float32", "int8", "bfloat16", "both")  # cells of `experiments.int8_losses`
FRAME = Frame(
    file="int8.csv",
    key=("run", *JOB),
    verb="rows int8",
    fields={
        "run": text(),
        "variant": text("job.variant"),
        "d_model": integer("job.model.d_model"),
        "seed": integer("job.seed"),
        "parameters": integer("values.parameters"),
        "tokens": integer(unit="scored"),
        **{f"ce_{name}": number(unit="nats/token") for name in LOSSES},
        "weights_sha256": text(),
        **PROVENANCE,
    },
)


def collect(paths: Iterable[Path], score: Callable[[Path], dict[str, Any]], *, run: str) -> pd.DataFrame:
    """A row for each trained model, a tapered one in its fused form.

    Args:
        paths: `result.json` of trainings, and of the folds of those that taper.
        score: from a model's folder, the columns that are measured.

    Raises:
        UserError: a file is missing, damaged or of another schema, or a tapered model comes without its fold.
    """
    trained, folded = trained_and_folded(paths)
    models = {job: path.parent for job, (path, _) in trained.items()}
    for job in models:
        if Variant.named(job[0]).tapers:
            if job not in folded:
                raise UserError(f"{trained[job][0]} is of a tapered model, and the result of its fold is not given")
            models[job] = folded[job][0].parent / "fused"
    rows = []
    for job, (path, document) in sorted(trained.items()):
        rows.append({"run": run, **FRAME.facts(document, path), **score(models[job])})
    return FRAME.typed([{name: row[name] for name in FRAME.fields} for row in rows])


def write(rows: pd.DataFrame, folder: Path) -> None:
    """Write the rows as CSV."""
    FRAME.write(rows, folder / FRAME.file)


def read(file: Path, *, run: str | None = None) -> pd.DataFrame:
    """Read back what `write` wrote. Raises as `Frame.read`."""
    return FRAME.read(file, run=run)
