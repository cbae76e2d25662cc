"""The tables and figures by name, each with its rows and the job that describes its run.

This module imports nothing heavy, because every start of Snakemake and of the command line imports it.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tapernorm.util.errors import UserError

from ..config.jobs import ClaimsJob, ReportJob, SettingsJob
from ..config.odd_inputs import OddInputsReportJob
from ..config.run import Config
from ..config.study_runs import StageJob, replaces_norms, stage_job

CLAIMS, TAPERS = "claims", "tapers"
OWN_STAGE = ""  # no stage of the study: the models of the run itself
Job = ReportJob | SettingsJob | ClaimsJob | StageJob | OddInputsReportJob


@dataclass(frozen=True)
class Source:
    """One kind of rows, from which tables and figures are made.

    Attributes:
        files: paths inside the results of the run; `{stage}` is a stage of the study.
        job: class of the job that describes the run.
        cut: takes that job from a config, for a stage.
        stages: the stages of a config that have such rows, or `OWN_STAGE`; empty if a run has no such rows.
    """

    files: tuple[str, ...]
    job: type[Job]
    cut: Callable[[Config, str], Job]
    stages: Callable[[Config], Iterable[str]]

    def at(self, stage: str = OWN_STAGE) -> tuple[str, ...]:
        """Return the files of a stage."""
        return tuple(file.format(stage=stage) for file in self.files)


def _own_if(condition: Callable[[Config], Any]) -> Callable[[Config], list[str]]:
    return lambda config: [OWN_STAGE] if condition(config) else []


def _of_paper(*files: str, where: Callable[[Config], Any] = lambda _: True) -> Source:
    return Source(files, ReportJob, lambda config, _: config.report_job(), _own_if(where))


def _of_config(where: Callable[[Config], Any]) -> Source:
    return Source((), SettingsJob, lambda config, _: config.settings_job(), _own_if(where))


def _of_stages(*files: str, where: Callable[[Any], Any] = lambda _: True) -> Source:
    return Source(files, StageJob, stage_job, lambda config: [s.name for s in config.study or () if where(s)])


def _of_odd_inputs(name: str, stages: Callable[[Config], Iterable[str]]) -> Source:
    files = tuple(f"tables/study_{name}{kind}.csv" for kind in ("", "_trials", "_positions"))
    return Source(files, OddInputsReportJob, lambda config, stage: config.odd_inputs_report_job(stage or None), stages)


_TRAINING = ("rows/results.csv", "rows/curves.csv")
_STAGE = "tables/study_{stage}.csv"
SOURCES = {
    "training": _of_paper(*_TRAINING),
    "gpt2": _of_paper(*(f"gpt2_rows/{name}.csv" for name in ("scores", "curves", "removals")), where=lambda c: c.gpt2),
    "decode": _of_paper("bench/decode.json", where=lambda c: c.benched),
    "int8": _of_paper("rows/int8.csv"),
    "last_token": _of_paper("bench/last_token.json", where=lambda c: c.benched),
    "settings": _of_config(lambda _: True),
    "gpt2_settings": _of_config(lambda c: c.gpt2),
    CLAIMS: Source(_TRAINING, ClaimsJob, lambda config, _: config.claims_job(), _own_if(lambda _: True)),
    "stage": _of_stages(_STAGE),
    "stage_figure": _of_stages(_STAGE, where=lambda stage: stage.figure),
    "oddities": _of_stages("tables/study_{stage}_oddities.csv", "bench/rivals_{stage}.json", where=replaces_norms),
    "odd_inputs": _of_odd_inputs("S3", _own_if(lambda c: c.robustness)),
    "odd_inputs_of_arms": _of_odd_inputs("S3_{stage}", lambda c: c.robustness.stages if c.robustness else ()),
}
_DESCRIBED = {
    "settings": "training",
    "gpt2_settings": "gpt2",
}  # a table of settings is published together with these rows
MEASURED = ("training", "gpt2", "decode", "last_token")  # rows on which the claims are judged
OWN_FILES = tuple(f"rows/{name}" for name in ("runs.json", "scores.csv", "spread.csv"))
_TABLES = {  # name, with `{stage}` for a stage of the study -> source
    "table1": "training",
    "table2": "decode",
    "table2x": "decode",
    "table2v1": "last_token",
    "table_int8": "int8",
    "table3": "gpt2",
    "table3x": "gpt2",
    "table4": "settings",
    "table5": "gpt2_settings",
    CLAIMS: CLAIMS,
    "table_S3": "odd_inputs",
    "table_S3x": "odd_inputs",
    "table_S3_{stage}": "odd_inputs_of_arms",
    "table_{stage}_oddities": "oddities",
    "table_{stage}": "stage",
}
_FIGURES = {
    "figure1a": "training",
    "figure1b": "training",
    "figure2": "training",
    "figure_decode": "decode",
    "figure_finetune": "gpt2",
    "figure_S3": "odd_inputs",
    "figure_{stage}": "stage_figure",
}


@dataclass(frozen=True)
class Product:
    """A table or a figure.

    Attributes:
        pattern: its name, with `{stage}` for a stage of the study or for the label of a taper.
        source: key of its rows in `SOURCES`, or `TAPERS`.
        stage: the stage, or the label of a taper.
        needs: files that it is made from, inside the results of the run.
        job: the job that describes the run; None until `told_by` sets it.
    """

    pattern: str
    source: str
    stage: str
    needs: tuple[str, ...]
    job: Any = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return self.pattern.format(stage=self.stage)

    @property
    def is_figure(self) -> bool:
        return self.name.startswith("figure")

    @property
    def job_class(self) -> type[Job]:
        return SOURCES[self.source].job

    @property
    def kinds(self) -> tuple[str, ...]:
        """Suffixes of its published files."""
        if self.is_figure:
            return ("csv", "md", "pdf", "png", "tex")
        return ("csv", "md", "tex")

    @property
    def files(self) -> list[tuple[str, str]]:
        """Its published files, each as ("results" or "figures", path inside that folder of the run)."""
        root, folder = ("figures", "") if self.is_figure else ("results", "" if self.name == CLAIMS else "tables/")
        return [(root, f"{folder}{self.name}.{kind}") for kind in self.kinds]

    def cut(self, config: Config) -> Job:
        """Take the job of this product from a config."""
        return SOURCES[self.source].cut(config, self.stage)

    def told_by(self, job: Job) -> "Product":
        """Return the product with its job.

        Raises:
            UserError: the job is of another stage.
        """
        found = job.stage.name if isinstance(job, StageJob) else getattr(job, "stage", None) or OWN_STAGE
        if found != self.stage:
            raise UserError(f"{self.name} needs a --job of {_about(self.stage)}, and this one is of {_about(found)}")
        return replace(self, job=job)


def named(name: str, *, figure: bool = False) -> Product:
    """Return the table, or the figure, of this name.

    Raises:
        UserError: there is none.
    """
    products = _FIGURES if figure else _TABLES
    for pattern, source in products.items():
        if found := re.fullmatch(pattern.replace("{stage}", "([A-Za-z][A-Za-z0-9]*)"), name):
            stage = found[1] if found.groups() else OWN_STAGE
            return Product(pattern, source, stage, SOURCES[source].at(stage))
    raise UserError(f"NAME {name!r} is no {'figure' if figure else 'table'}: give one of {names(figure=figure)}")


def names(*, figure: bool = False) -> str:
    """Return the names of all tables, or of all figures, as text."""
    return ", ".join(_FIGURES if figure else _TABLES).replace("{stage}", "STAGE")


def products_of(config: Config) -> dict[str, Product]:
    """Return name -> table or figure, for all that a run of this config has."""
    found = {}
    for pattern, source in (_TABLES | _FIGURES).items():
        for stage in SOURCES[source].stages(config):
            product = Product(pattern, source, stage, _needs(config, source, stage))
            found[product.name] = product
    return found


def _needs(config: Config, source: str, stage: str) -> tuple[str, ...]:
    sources = asked_sources(config) if source == CLAIMS else [source]
    return tuple(file for name in sources for file in SOURCES[name].at(stage))


def asked_sources(config: Config) -> list[str]:
    """Return the sources, among those of the claims, that a run of this config measures."""
    return [name for name in MEASURED if SOURCES[name].stages(config)]


def entries(config: Config) -> list[Product]:
    """Return the tables and figures to publish of a run of this config, each with its job."""
    found = [product.told_by(product.cut(config)) for product in products_of(config).values()]
    return [replace(one, needs=one.needs or SOURCES[_DESCRIBED[one.source]].files) for one in found]


def odd_inputs_files(stage: str | None) -> tuple[str, ...]:
    """Return the files of the scores on odd inputs, of the arms of a stage or, with None, of the models of the run."""
    return SOURCES["odd_inputs"].at() if stage is None else SOURCES["odd_inputs_of_arms"].at(stage)


def own_entries(labels: Iterable[str]) -> list[Product]:
    """Return the tables and figures of runs of `tapernorm taper`, by their labels in `tapernorm rows tapers`."""
    made = [Product("scores", TAPERS, OWN_STAGE, OWN_FILES)]
    for label in labels:
        made += [Product(p, TAPERS, label, OWN_FILES) for p in ("norms_{stage}", "figure_spread_{stage}")]
    return made


def _about(stage: str) -> str:
    return f"stage {stage}" if stage else "the models of the run itself"
