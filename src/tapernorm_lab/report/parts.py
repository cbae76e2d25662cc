"""The contents of a run: parts, each of rows and the results behind them, and the tables and figures of these rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from tapernorm.util.atomic_files import read_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json, digest

from ..config.load import parse
from ..config.run import Config
from ..config.study_runs import replaces_norms, stage_job
from . import provenance as origin
from .catalogue import OWN_FILES, OWN_STAGE, SOURCES, Product, asked_sources, entries, own_entries
from .frames import decoding, gpt2, int8, own_models, pretraining
from .makers import READERS
from .read_json import read_document, stored, value_at

CONFIG = "config.json"  # config of a published run
BENCH = "bench"  # run of `make bench`, which has no config
_BENCH_FILES = ("bench.json", "samples.json", "provenance.json")
_RIVALS = "rivals.json"  # of `make bench-rivals`, in the same folder


@dataclass(frozen=True)
class Part:
    """Rows that are published together.

    Attributes:
        files: paths of the rows inside the results of the run.
        origins: takes the results folder; returns a row of provenance for each result behind the rows.
        require: takes a results folder; raises UserError if its rows are of other jobs than the config's.
    """

    name: str
    files: tuple[str, ...]
    origins: Callable[[Path], list[origin.Row]]
    require: Callable[[Path], None]

    def is_in(self, results: Path) -> bool:
        """Whether a results folder has these rows.

        Raises:
            UserError: it has only some of their files.
        """
        missing = [file for file in self.files if not stored(results / file).is_file()]
        if missing and len(missing) < len(self.files):
            raise UserError(
                f"{results} lacks {', '.join(missing)} of the rows {self.name}: gather them again with `tapernorm rows`"
            )
        return not missing


@dataclass(frozen=True)
class Contents:
    """The parts that a run can have, and the tables and figures made from them."""

    run: str
    parts: Sequence[Part]
    entries: Sequence[Product]
    config: Config | None = None


def contents_of(results: Path) -> Contents:
    """Return the contents of a published run.

    Raises:
        UserError: the folder holds no published run.
    """
    if any((results / file).is_file() for file in (_BENCH_FILES[0], _RIVALS)):
        return bench_contents()
    if (results / OWN_FILES[0]).is_file():
        return own_contents(results)
    if (results / CONFIG).is_file():
        return config_contents(parse(Config, read_json(results / CONFIG), str(results / CONFIG)))
    raise UserError(f"{results} holds no published run: publish a computed run with `make publish RUN={results.name}`")


def bench_contents() -> Contents:
    """Return the contents of the run of `make bench` and `make bench-rivals`."""

    def origins(results: Path) -> list[origin.Row]:
        told = read_json(results / "provenance.json")
        return [origin.row(_BENCH_FILES[0], {"kind": BENCH, "provenance": told})]

    def origins_of_rivals(results: Path) -> list[origin.Row]:
        told = [comparison["provenance"] for comparison in read_json(results / _RIVALS)["comparisons"]]
        return [origin.row(_RIVALS, {"kind": BENCH, "provenance": one}) for one in told]

    figures = Part(BENCH, _BENCH_FILES, origins, lambda _: None)
    return Contents(BENCH, [figures, Part("rivals", (_RIVALS,), origins_of_rivals, lambda _: None)], [])


def own_contents(results: Path) -> Contents:
    """Return the contents of a run that `tapernorm rows tapers` gathered."""
    known = own_models.read(results / own_models.FOLDER)

    def origins(results: Path) -> list[origin.Row]:
        runs = own_models.read(results / own_models.FOLDER).runs
        return [
            origin.row(label, {"kind": "finetune", "provenance": facts["provenance"]})
            | {"seed": facts["seed"], "train_time_s": facts["train_time_s"]}
            for label, facts in runs.items()
        ]

    part = Part("tapers", OWN_FILES, origins, lambda _: None)
    return Contents(known.run, [part], own_entries(known.runs))


def config_contents(config: Config) -> Contents:
    """Return the contents of a run of the workflow."""
    made = {"training": _training, "gpt2": _gpt2, "decode": _benched, "last_token": _benched}
    of_paper = [made[source](config, source) for source in asked_sources(config)]
    return Contents(config.run, [*of_paper, _int8(config), *_study(config), *_trials(config)], entries(config), config)


def _training(config: Config, source: str) -> Part:
    return _of_cells(config, source, lambda results: pretraining.read(results / "rows")[0])


def _int8(config: Config) -> Part:
    (file,) = SOURCES["int8"].files
    return _of_cells(config, "int8", lambda results: int8.read(results / file))


def _of_cells(config: Config, source: str, read: Callable[[Path], pd.DataFrame]) -> Part:
    """Rows with one for each model of the run's own."""
    cells = config.pretrain_cells()
    places = [f"pretrain/{variant}/d{width}/seed{seed}/result.json" for variant, width, seed in cells]
    places += [f"fold/{variant}/d{width}/seed{seed}/result.json" for variant, width, seed in cells if variant.tapers]

    def require(results: Path) -> None:
        wanted = {(str(v), *cell): digest(canonical_json(config.pretrain_job(v, *cell))) for v, *cell in cells}
        _require_jobs(read(results).to_dict("records"), pretraining.JOB, wanted)

    return Part(source, SOURCES[source].files, partial(origin.collect_below, places), require)


def _gpt2(config: Config, source: str) -> Part:
    models = config.models_under_test()
    places = [f"gpt2/base/{size}/result.json" for size in dict.fromkeys(model.size for model in models)]
    places += [f"finetune/{method}/{size}/seed{seed}/result.json" for method, size, seed in config.finetune_cells()]
    for model in models:
        name = model.size if model.seed is None else f"{model.size}/seed{model.seed}"
        places.append(f"evaluate/{model.method}/{name}.json")

    def require(results: Path) -> None:
        scores = gpt2.read(results / "gpt2_rows").scores.to_dict("records")
        found = [{**row, "seed": None if pd.isna(row["seed"]) else int(row["seed"])} for row in scores]
        wanted = {
            (m.size, m.method, m.seed): digest(canonical_json(config.evaluate_job(m.method, m.size, m.seed)))
            for m in models
        }
        _require_jobs(found, gpt2.MODEL, wanted)

    return Part(source, SOURCES[source].files, partial(origin.collect_below, places), require)


def _benched(config: Config, source: str) -> Part:
    files = SOURCES[source].files
    return Part(source, files, partial(origin.collect_below, files), partial(_require_bench, config, files[0]))


def _require_bench(config: Config, file: str, results: Path) -> None:
    document = read_document(results / file, decoding.DECODE, decoding.LAST_TOKEN, decoding.REPLACEMENTS)
    found = value_at(document, "provenance.config_hash", results / file)
    if found != digest(config.bench_job().model_dump(mode="json")):
        raise UserError(
            f"{results / file} was measured with other settings than the bench section of the config: measure again"
        )


def _study(config: Config) -> Iterable[Part]:
    for stage in config.study or ():
        job = stage_job(config, stage.name)
        runs = [f"{folder}/result.json" for folder in dict.fromkeys(run.folder for run in job.runs)]
        yield _read_by_job(stage.name, "stage", stage.name, job, runs)
        if replaces_norms(stage):
            bench = SOURCES["oddities"].at(stage.name)[1]
            measured = partial(_require_bench, config, bench)
            yield _read_by_job(f"{stage.name}_oddities", "oddities", stage.name, job, [*runs, bench], measured)


def _trials(config: Config) -> Iterable[Part]:
    for stage in (None, *config.robustness.stages) if config.robustness else ():
        job = config.odd_inputs_report_job(stage)
        source = "odd_inputs" if stage is None else "odd_inputs_of_arms"
        folders = [(f"d{width}" if stage is None else f"study/{stage}", seed) for width, seed in job.cells]
        places = [f"robustness/{folder}/seed{seed}.json" for folder, seed in folders]
        yield _read_by_job(job.name, source, stage or OWN_STAGE, job, places)


def _read_by_job(
    name: str, source: str, stage: str, job: Any, places: Sequence[str], also: Callable[[Path], None] = lambda _: None
) -> Part:
    """Return a part whose reader compares the rows with the job."""
    files = SOURCES[source].at(stage)

    def require(results: Path) -> None:
        READERS[source]([results / file for file in files], job)
        also(results)

    return Part(name, files, partial(origin.collect_below, places), require)


def _require_jobs(found: Sequence[Mapping[Any, Any]], keys: Sequence[str], wanted: Mapping[Any, str]) -> None:
    """Refuse rows of other jobs than `wanted`, which maps (key, ...) to the hash of the job."""
    hashes = {(tuple(row[key] for key in keys), row["config_hash"]) for row in found}
    if differing := sorted({" ".join(map(str, key)) for key, _ in hashes.symmetric_difference(wanted.items())}):
        shown = ", ".join(differing[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
        raise UserError(
            f"the rows are of other jobs than the config's, at {shown}: run the workflow with this config again"
        )
