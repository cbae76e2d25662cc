"""Every table and figure by its name: the job that makes it, and the rows that it is made from.

Imports nothing heavy: each start of Snakemake reads it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tapernorm.util.errors import UserError

from ..config.jobs import ClaimsJob, ReportJob, SettingsJob
from ..config.odd_inputs import TrialsJob
from ..config.run import Config
from ..config.study_runs import StageJob, has_rivals, stage_job
from .sources import FIGURES, ODDITIES_ROWS, RIVALS_BENCH, SETTINGS, SOURCES, STAGE_ROWS, TABLES, TRIALS_ROWS

CLAIMS = "claims"
_STAGE = "[A-Za-z][A-Za-z0-9]*"
Job = ReportJob | SettingsJob | ClaimsJob | StageJob | TrialsJob


@dataclass(frozen=True)
class Product:
    """A table or figure.

    Attributes:
        kind: the class of its job.
        cut: its job, of a config.
        needs: files that it is made from, below the results of the run.
        stage: the stage of the study that it is about; None: the run's own models.
    """

    kind: type[Job]
    cut: Callable[[Config], Job]
    needs: tuple[str, ...]
    stage: str | None = None

    def require_job(self, job: Job, name: str) -> None:
        """Raise UserError for a job of another stage."""
        found = job.stage.name if isinstance(job, StageJob) else getattr(job, "stage", None)
        if found != self.stage:
            raise UserError(f"{name} is about {_about(self.stage)}, and --job about {_about(found)}")


def table_named(name: str) -> Product:
    """The table of this name.

    Raises:
        UserError: there is none.
    """
    if name in TABLES:
        return Product(ReportJob, Config.report_job, SOURCES[TABLES[name]].files)
    if name in SETTINGS:
        return Product(SettingsJob, Config.settings_job, ())
    if name == CLAIMS:
        return Product(ClaimsJob, Config.claims_job, SOURCES["training"].files)
    if name in ("table_S3", "table_S3x"):
        return _of_trials(None)
    if found := re.fullmatch(f"table_S3_({_STAGE})", name):
        return _of_trials(found[1])
    if found := re.fullmatch(f"table_({_STAGE})_oddities", name):
        return _of_stage(found[1], ODDITIES_ROWS, RIVALS_BENCH)
    if found := re.fullmatch(f"table_({_STAGE})", name):
        return _of_stage(found[1], STAGE_ROWS)
    known = [*TABLES, *SETTINGS, CLAIMS, "table_S3", "table_S3x", "table_S3_STAGE", "table_STAGE"]
    raise UserError(f"no table {name!r}; there are {', '.join([*known, 'table_STAGE_oddities'])}")


def figure_named(name: str) -> Product:
    """The figure of this name.

    Raises:
        UserError: there is none.
    """
    if name in FIGURES:
        return Product(ReportJob, Config.report_job, SOURCES[FIGURES[name]].files)
    if name == "figure_S3":
        return _of_trials(None)
    if found := re.fullmatch(f"figure_({_STAGE})", name):
        return _of_stage(found[1], STAGE_ROWS)
    raise UserError(f"no figure {name!r}; there are {', '.join([*FIGURES, 'figure_S3', 'figure_STAGE'])}")


def tables_of(config: Config) -> dict[str, Product]:
    """The tables that a run of this config has, its claims apart."""
    of_stages = [f"table_{stage.name}" for stage in config.study or ()]
    odd = [f"table_{stage.name}_oddities" for stage in config.study or () if has_rivals(stage)]
    tried = config.robustness
    trials = [] if tried is None else ["table_S3", "table_S3x", *(f"table_S3_{stage}" for stage in tried.stages)]
    names = [*_asked(config, TABLES), *_asked(config, SETTINGS), *of_stages, *odd, *trials]
    return {name: table_named(name) for name in names}


def figures_of(config: Config) -> dict[str, Product]:
    """The figures that a run of this config has."""
    of_stages = [f"figure_{stage.name}" for stage in config.study or () if stage.figure]
    trials = [] if config.robustness is None else ["figure_S3"]
    return {name: figure_named(name) for name in [*_asked(config, FIGURES), *of_stages, *trials]}


def _asked(config: Config, sources: dict[str, str]) -> list[str]:
    missing = set() if config.gpt2 else {"gpt2"}
    missing |= set() if config.benched else {"decode", "last_token"}
    return [name for name, source in sources.items() if source not in missing]


def _of_stage(stage: str, *needs: str) -> Product:
    files = tuple(path.format(stage=stage) for path in needs)
    return Product(StageJob, lambda config: stage_job(config, stage), files, stage)


def _of_trials(stage: str | None) -> Product:
    trials = "S3" if stage is None else f"S3_{stage}"
    files = tuple(path.format(trials=trials) for path in TRIALS_ROWS)
    return Product(TrialsJob, lambda config: config.trials_job(stage), files, stage)


def _about(stage: str | None) -> str:
    return "the run's own models" if stage is None else f"stage {stage}"
