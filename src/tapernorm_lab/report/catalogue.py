"""Every table and figure that a run can have, by name: the rows that it is made from, and what makes it of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from tapernorm.util.atomic_files import write_text
from tapernorm.util.errors import UserError

from ..config.jobs import ClaimsJob, ReportJob, SettingsJob
from ..config.odd_inputs import TrialsJob
from ..config.run import Config
from ..config.study import Stage
from ..config.study_runs import StageJob, has_rivals, stage_job
from . import claims, table
from .figures import (
    decoding as decode_figure,
)
from .figures import (
    figure1_2_curves as figures,
)
from .figures import (
    finetuning as gpt2_figure,
)
from .figures import (
    odd_inputs as robustness_figure,
)
from .figures import (
    scale_target as target_figure,
)
from .figures import (
    study_stages as study_figure,
)
from .figures import (
    token_scales as spread_figure,
)
from .frames import (
    decoding as decode_rows,
)
from .frames import (
    gpt2 as gpt2_rows,
)
from .frames import (
    gpt2_summary,
)
from .frames import (
    inference_graph as oddities_rows,
)
from .frames import (
    odd_inputs as robustness_rows,
)
from .frames import (
    own_models as own_rows,
)
from .frames import (
    pretraining as rows,
)
from .frames import (
    study_stages as study_rows,
)
from .sources import (
    FIGURES,
    ODDITIES_ROWS,
    RIVALS_BENCH,
    SETTINGS,
    SOURCES,
    STAGE_ROWS,
    TABLES,
    TRIALS_ROWS,
)
from .table import Table
from .tables import (
    inference_graph as oddities_table,
)
from .tables import (
    odd_inputs as robustness_table,
)
from .tables import (
    own_models as own_tables,
)
from .tables import (
    study_stages as study_tables,
)
from .tables import (
    table1_pretraining as tables,
)
from .tables import (
    table2_decoding as decode_tables,
)
from .tables import (
    table3_gpt2 as gpt2_tables,
)
from .tables import (
    table4_5_settings as settings_tables,
)

CLAIMS = "claims"
Drawing = tuple[Figure, pd.DataFrame]  # with what it draws


@dataclass(frozen=True)
class Entry:
    """Tables, or a figure, that are made together.

    Attributes:
        names: of these tables, or of the figure.
        needs: files that they are made from, below the results of the run.
        make: the tables, or the figure, from the rows of the run.
    """

    names: tuple[str, ...]
    needs: tuple[str, ...]
    make: Callable[["Rows"], list[Table] | Drawing]

    @property
    def is_figure(self) -> bool:
        return self.names[0].startswith("figure")


class Rows:
    """The rows below the results of a run; each source of the paper's tables is read once."""

    def __init__(self, results: Path, run: str) -> None:
        self.results, self.run = results, run
        self.of = cache(lambda source: read(source, results / SOURCES[source].place, run=run))

    @cached_property
    def own(self) -> own_rows.OwnRows:
        """Those of tapers of one's own."""
        return own_rows.read(self.results / own_rows.FOLDER)


def read(source: str, path: Path, *, run: str) -> Any:
    """The rows or samples of a source, from its folder or file.

    Raises:
        UserError: a file is missing or damaged, or the rows are of another run.
    """
    if source in ("decode", "last_token"):
        return decode_rows.read(path, kind=f"bench_{source}")
    found = rows.read(path) if source == "training" else gpt2_rows.read(path)
    runs = set((found[0] if isinstance(found, tuple) else found.scores)["run"])
    if others := runs - {run}:  # never printed under the name of another
        raise UserError(f"the rows are of run {', '.join(sorted(others))} and the config is of run {run!r}")
    return found


def make_table(name: str, found: Any, job: ReportJob) -> Table:
    """One of `TABLES`, of what `read` gave of its source."""
    shared = {"run": job.run, "caption": job.caption}
    if name == "table1":
        return tables.table1(found[0], labels=job.labels, **shared)
    if TABLES[name] == "gpt2":
        make = {"table3": gpt2_tables.table3, "table3x": gpt2_tables.table3x}
        return make[name](found.scores, **shared)
    make = {"table2": decode_tables.table2, "table2x": decode_tables.table2x, "table2v1": decode_tables.table2v1}
    return make[name](found, **shared)


def make_figure(name: str, found: Any, job: ReportJob) -> Drawing:
    """One of `FIGURES`, of what `read` gave of its source."""
    shared = {"run": job.run, "caption": job.caption}
    if name == "figure_decode":
        return decode_figure.figure_decode(found, **shared)
    if name == "figure_finetune":
        return gpt2_figure.figure_finetune(found.curves, found.removals, **shared)
    make = {"figure1a": figures.figure1a, "figure1b": figures.figure1b, "figure2": figures.figure2}
    return make[name](found[1], labels=job.labels, **shared)


def make_claims(job: ClaimsJob, found: Mapping[str, Any]) -> Table:
    """The table of claims, of what `read` gave of each source; a source that was not measured is left out."""
    results, curves = found["training"]
    gpt2 = found.get("gpt2")
    measured = claims.Measured(
        results=results,
        curves=curves,
        text=job.text,
        decode=found.get("decode"),
        last_token=found.get("last_token"),
        gpt2=None if gpt2 is None else gpt2_summary.table3_rows(gpt2.scores, run=job.run),
    )
    return claims.claims_table(measured, run=job.run, caption=job.caption)


def make_settings(name: str, job: SettingsJob) -> Table:
    """One of `SETTINGS`."""
    make = {"table4": settings_tables.table4, "table5": settings_tables.table5}
    return make[name](job)


def make_stage_figure(found: pd.DataFrame, job: StageJob) -> Drawing:
    """The figure of a stage, of the kind that its setting `figure` names."""
    if job.stage.figure is None:
        raise UserError(f"stage {job.stage.name} has no figure: its setting `figure` is null")
    make = {"window": study_figure.stage_figure, "scale_target": target_figure.target_figure}
    return make[job.stage.figure](found, job)


def entries(config: Config) -> list[Entry]:
    """All that a run of this config can have, in the order in which it is made."""
    of_stages = [entry for stage in config.study or () for entry in _of_stage(config, stage)]
    return [*_of_paper(config), *of_stages, *_of_trials(config)]


def asked_sources(config: Config) -> list[str]:
    """The sources that a run of this config has."""
    benched = ["decode", "last_token"] if config.benched else []
    return ["training", *(["gpt2"] if config.gpt2 else []), *benched]


def _of_paper(config: Config) -> Iterator[Entry]:
    asked, job = asked_sources(config), config.report_job()

    def table_of(name: str, found: Rows) -> list[Table]:
        return [make_table(name, found.of(TABLES[name]), job)]

    def settings_of(name: str, _: Rows) -> list[Table]:
        return [make_settings(name, config.settings_job())]

    def figure_of(name: str, found: Rows) -> Drawing:
        return make_figure(name, found.of(FIGURES[name]), job)

    def claims_of(found: Rows) -> list[Table]:
        return [make_claims(config.claims_job(), {source: found.of(source) for source in asked})]

    for makes, make in ((TABLES, table_of), (SETTINGS, settings_of), (FIGURES, figure_of)):
        for name, source in makes.items():
            if source in asked:
                yield Entry((name,), SOURCES[source].files, partial(make, name))
    yield Entry((CLAIMS,), tuple(file for source in asked for file in SOURCES[source].files), claims_of)


def _of_stage(config: Config, stage: Stage) -> Iterator[Entry]:
    job = stage_job(config, stage.name)
    place, odd, bench = (path.format(stage=stage.name) for path in (STAGE_ROWS, ODDITIES_ROWS, RIVALS_BENCH))

    def table_of(found: Rows) -> list[Table]:
        return [study_tables.stage_table(study_rows.read(found.results / place, job), job)]

    def figure_of(found: Rows) -> Drawing:
        return make_stage_figure(study_rows.read(found.results / place, job), job)

    def oddities_of(found: Rows) -> list[Table]:
        timed = decode_rows.read(found.results / bench, kind=decode_rows.RIVALS)
        return [oddities_table.oddities_table(oddities_rows.read(found.results / odd, job), timed, job)]

    yield Entry((f"table_{stage.name}",), (place,), table_of)
    if stage.figure:
        yield Entry((f"figure_{stage.name}",), (place,), figure_of)
    if has_rivals(stage):
        yield Entry((f"table_{stage.name}_oddities",), (odd, bench), oddities_of)


def _of_trials(config: Config) -> Iterator[Entry]:
    def read_trials(job: TrialsJob, found: Rows) -> robustness_rows.RobustnessRows:
        scored = robustness_rows.read(found.results / "tables", run=job.run, name=job.name)
        robustness_rows.require(scored, job)
        return scored

    def tables_of(job: TrialsJob, found: Rows) -> list[Table]:
        return robustness_table.tables(read_trials(job, found), job)

    def figure_of(job: TrialsJob, found: Rows) -> Drawing:
        return robustness_figure.figure_s3(read_trials(job, found), run=job.run, caption=job.caption)

    if config.robustness is None:
        return
    for stage in (None, *config.robustness.stages):
        job = config.trials_job(stage)
        needs = tuple(path.format(trials=job.name) for path in TRIALS_ROWS)
        names = ("table_S3", "table_S3x") if stage is None else (f"table_{job.name}",)
        yield Entry(names, needs, partial(tables_of, job))
        if stage is None:
            yield Entry(("figure_S3",), needs, partial(figure_of, job))


def own_entries(labels: Iterable[str]) -> list[Entry]:
    """All that tapers of one's own have, which `tapernorm rows tapers` gathers."""

    def scores_of(found: Rows) -> list[Table]:
        return [own_tables.scores_table(found.own)]

    def norms_of(label: str, found: Rows) -> list[Table]:
        return [own_tables.norms_table(label, found.own)]

    def figure_of(label: str, found: Rows) -> Drawing:
        named, caption = f"{found.own.run}, {label}", found.own.caption
        return spread_figure.figure_spread(found.own.spread_of(label), run=named, caption=caption)

    made = [Entry(("scores",), own_rows.FILES, scores_of)]
    for label in labels:
        made.append(Entry((f"norms_{label}",), own_rows.FILES, partial(norms_of, label)))
        made.append(Entry((f"figure_spread_{label}",), own_rows.FILES, partial(figure_of, label)))
    return made


def files_of(entry: Entry) -> list[tuple[str, str]]:
    """("results" or "figures", file below that folder of the run) of every file that `write` makes of an entry."""
    if entry.is_figure:
        return [("figures", f"{name}.{kind}") for name in entry.names for kind in ("csv", "pdf", "png")]
    if entry.names == (CLAIMS,):
        return [("results", f"{CLAIMS}.{kind}") for kind in ("csv", "md")]
    return [("results", f"tables/{name}.{kind}") for name in entry.names for kind in ("csv", "md", "tex")]


def write(entry: Entry, found: Rows, results: Path, drawings: Path) -> None:
    """Make the files of an entry, below the results and the figures of the run."""
    made = entry.make(found)
    if isinstance(made, tuple):
        figures.save(*made, drawings / entry.names[0])
        return
    for one in made:
        if one.name == CLAIMS:
            table.write_csv(one, results)
            write_text(results / f"{CLAIMS}.md", table.markdown(one))
        else:
            table.write(one, results / "tables")
