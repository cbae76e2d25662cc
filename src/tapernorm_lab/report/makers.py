"""The functions that read the rows of each source, and those that make each table and figure from them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..config.study_runs import StageJob
from . import claims, table
from .catalogue import CLAIMS, MEASURED, OWN_FILES, OWN_STAGE, SOURCES, TAPERS, Product
from .figures.decoding import FIGURE_DECODE
from .figures.figure import Drawing, save
from .figures.finetuning import FIGURE_FINETUNE
from .figures.odd_inputs import FIGURE_S3
from .figures.pretraining import FIGURE1A, FIGURE1B, FIGURE2
from .figures.study_stages import draw_stage
from .figures.token_scales import FIGURE_SPREAD
from .frames import decoding, gpt2, inference_graph, int8, odd_inputs, own_models, pretraining, study_stages
from .read_json import stored
from .table import Table
from .tables import inference_graph as graph_table
from .tables import int8 as int8_tables
from .tables import odd_inputs as odd_tables
from .tables import own_models as own_tables
from .tables import study_stages as stage_tables
from .tables import table1_pretraining as pretraining_table
from .tables import table2_decoding as decode_tables
from .tables import table3_gpt2 as gpt2_tables
from .tables import table4_5_settings as settings_tables


def _read_stage(files: Sequence[Path], job: StageJob) -> pd.DataFrame:
    return study_stages.read(files[0], job)


def _read_graphs(files: Sequence[Path], job: StageJob) -> Any:
    """Read the inference graphs of the arms and, if it exists, the benchmark of the replacements."""
    timed = decoding.read(files[1], kind=decoding.REPLACEMENTS) if files[1].is_file() else None
    return inference_graph.read(files[0], job), timed


def _read_odd_inputs(files: Sequence[Path], job: Any) -> odd_inputs.RobustnessRows:
    rows = odd_inputs.read(files[0].parent, run=job.run, name=job.name)
    odd_inputs.require(rows, job)
    return rows


READERS: dict[str, Callable[[Sequence[Path], Any], Any]] = {  # source -> reads its rows; takes its files and the job
    "training": lambda files, job: pretraining.read(files[0].parent, run=job.run),
    "gpt2": lambda files, job: gpt2.read(files[0].parent, run=job.run),
    "decode": lambda files, _: decoding.read(files[0]),
    "last_token": lambda files, _: decoding.read(files[0], kind=decoding.LAST_TOKEN),
    "int8": lambda files, job: int8.read(files[0], run=job.run),
    "settings": lambda *_: None,
    "gpt2_settings": lambda *_: None,
    "stage": _read_stage,
    "stage_figure": _read_stage,
    "oddities": _read_graphs,
    "odd_inputs": _read_odd_inputs,
    "odd_inputs_of_arms": _read_odd_inputs,
    TAPERS: lambda files, _: own_models.read(files[0].parent),
}


MAKERS: dict[str, Callable[[Any, Any], Table | Drawing]] = {  # name -> takes the rows, and the job or the label
    "table1": pretraining_table.table1,
    "table2": decode_tables.table2,
    "table2x": decode_tables.table2x,
    "table2v1": decode_tables.table2v1,
    "table_int8": int8_tables.int8_table,
    "table3": gpt2_tables.table3,
    "table3x": gpt2_tables.table3x,
    "table4": settings_tables.table4,
    "table5": settings_tables.table5,
    CLAIMS: claims.claims_table,
    "table_S3": odd_tables.table_s3,
    "table_S3x": odd_tables.table_s3x,
    "table_S3_{stage}": odd_tables.table_of_arms,
    "table_{stage}_oddities": graph_table.oddities_table,
    "table_{stage}": stage_tables.stage_table,
    "scores": own_tables.scores_table,
    "norms_{stage}": own_tables.norms_table,
    "figure1a": FIGURE1A.draw,
    "figure1b": FIGURE1B.draw,
    "figure2": FIGURE2.draw,
    "figure_decode": FIGURE_DECODE.draw,
    "figure_finetune": FIGURE_FINETUNE.draw,
    "figure_S3": FIGURE_S3.draw,
    "figure_{stage}": draw_stage,
    "figure_spread_{stage}": FIGURE_SPREAD.draw,
}


class Rows:
    """The rows in the results of a run. Each source is read once."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self._known: dict[tuple[str, str], Any] = {}

    def of(self, product: Product) -> Any:
        """Return the rows of a table or figure; for the claims, source -> rows.

        Raises:
            UserError: a file is missing or damaged, or the rows are of another run.
        """
        if product.source == CLAIMS:
            return {name: self._of(name, OWN_STAGE, product.job) for name in MEASURED if self._has(name)}
        return self._of(product.source, product.stage, product.job)

    def _of(self, source: str, stage: str, job: Any) -> Any:
        if (source, stage) not in self._known:
            files = OWN_FILES if source == TAPERS else SOURCES[source].at(stage)
            self._known[source, stage] = READERS[source]([self.results / file for file in files], job)
        return self._known[source, stage]

    def _has(self, source: str) -> bool:
        """Whether the run has these rows. Those of the training are required, so that their absence is an error."""
        return source == "training" or all(stored(self.results / file).is_file() for file in SOURCES[source].files)


def make(product: Product, found: Rows) -> Table | Drawing:
    """Make a table, or a figure with its data and its caption."""
    return MAKERS[product.pattern](found.of(product), product.job or product.stage)


def write(product: Product, found: Rows, results: Path, drawings: Path) -> None:
    """Make a table or figure, and write its published files into the results or the figures of the run."""
    made = make(product, found)
    if isinstance(made, Table):
        table.write(made, results if product.name == CLAIMS else results / "tables", product.kinds)
    else:
        save(made, drawings / product.name)
