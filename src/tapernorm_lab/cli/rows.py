"""The verb that gathers finished results into CSV files: rows."""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapernorm.util.errors import UserError

from ..config.odd_inputs import OddInputsReportJob
from ..config.study_runs import StageJob, stage_job
from ..report.catalogue import OWN_FILES, SOURCES
from .arguments import ON_DEVICE, PER_GPU, THREADS, job_of, named_folders, require_options, writes

_STAGE = "[A-Za-z][A-Za-z0-9]*"
_SCALE_TOKENS = 8192


@dataclass(frozen=True)
class _Kind:
    """One kind of rows.

    Attributes:
        needs: options that must be given.
        gather: writes the rows into --out; its second argument is the stage in the name of the rows, or None.
        may: options that may be given besides.
    """

    needs: Sequence[str]
    gather: Callable[[argparse.Namespace, str | None], None]
    may: Sequence[str] = ()


def rows(arguments: argparse.Namespace) -> None:
    kind, stage = _kind_of(arguments.name)
    every = {name for other in _KINDS.values() for name in (*other.needs, *other.may)}
    require_options(arguments, f"rows {arguments.name}", needs=kind.needs, may=kind.may, of=sorted(every))
    kind.gather(arguments, stage)


def _kind_of(name: str) -> tuple[_Kind, str | None]:
    for pattern, kind in _KINDS.items():
        if found := re.fullmatch(pattern, name):
            return kind, found[1] if found.groups() else None
    raise UserError(f"NAME {name!r} names no rows: give one of {', '.join(_shown())}")


def _shown() -> list[str]:
    return [re.sub(r"\(.*?\)", "STAGE", pattern) for pattern in _KINDS]


def _paths(arguments: argparse.Namespace) -> list[Path]:
    return [Path(file) for file in arguments.result]


def _training(arguments: argparse.Namespace, _: str | None) -> None:
    from ..report.frames import pretraining

    with writes(arguments, *(Path(file).name for file in SOURCES["training"].files)):
        pretraining.write(*pretraining.collect(_paths(arguments), run=arguments.run), arguments.out)


def _gpt2(arguments: argparse.Namespace, _: str | None) -> None:
    from ..report.frames import gpt2

    finetunes = [file for file in _paths(arguments) if file.name == "result.json"]
    evaluations = [file for file in _paths(arguments) if file.name != "result.json"]
    with writes(arguments, *(Path(file).name for file in SOURCES["gpt2"].files)):
        gpt2.write(gpt2.collect(evaluations, finetunes, run=arguments.run), arguments.out)


def _int8(arguments: argparse.Namespace, _: str | None) -> None:
    from ..experiments.int8_losses import int8_losses
    from ..report.frames import int8

    def score(folder: Path) -> dict[str, Any]:
        return int8_losses(folder, arguments.tokens, threads=arguments.threads or 1)

    with writes(arguments, int8.FRAME.file):
        int8.write(int8.collect(_paths(arguments), score, run=arguments.run), arguments.out)


def _provenance(arguments: argparse.Namespace, _: str | None) -> None:
    from ..report import html, provenance, table

    with writes(arguments, "provenance.csv", "provenance.html"):
        made = provenance.provenance_table(provenance.collect(_paths(arguments)), run=arguments.run)
        table.write_csv(made, arguments.out)
        html.write(made, arguments.out)


def _stage(arguments: argparse.Namespace, stage: str | None) -> None:
    job = _stage_job(arguments, stage)
    from ..report.frames import study_stages

    name = Path(SOURCES["stage"].at(job.stage.name)[0]).name
    with writes(arguments, name):
        study_stages.write(study_stages.collect(job, arguments.results), arguments.out / name)


def _oddities(arguments: argparse.Namespace, stage: str | None) -> None:
    job = _stage_job(arguments, stage)
    from ..report.frames import inference_graph
    from ..training.gpu_slots import device_slot

    chosen = arguments.device or "auto"
    with device_slot(chosen, arguments.jobs_per_gpu or 1):
        from ..experiments.speed.inference_graph import inspect_stage

        found = inspect_stage(job, arguments.results, arguments.tokens, device=chosen, threads=arguments.threads or 1)
    name = Path(SOURCES["oddities"].at(job.stage.name)[0]).name
    with writes(arguments, name):
        inference_graph.write(found, arguments.out / name)


def _stage_job(arguments: argparse.Namespace, stage: str | None) -> StageJob:
    assert stage is not None
    job = job_of(arguments, StageJob, lambda config: stage_job(config, stage))
    if job.stage.name != stage:
        raise UserError(
            f"rows {arguments.name} needs a --job of stage {stage}, and this one is of stage {job.stage.name}"
        )
    return job


def _trials(arguments: argparse.Namespace, stage: str | None) -> None:
    job = job_of(arguments, OddInputsReportJob, lambda config: config.odd_inputs_report_job(stage))
    if job.stage != stage:
        raise UserError(f"--job gives rows study_{job.name}, not {arguments.name}: change NAME or --job")
    from ..report.frames import odd_inputs

    found = odd_inputs.collect(_paths(arguments), run=job.run)
    odd_inputs.require(found, job)
    with writes(arguments, *(file.name for file in odd_inputs.files(arguments.out, job.name).values())):
        odd_inputs.write(found, arguments.out, name=job.name)


def _tapers(arguments: argparse.Namespace, _: str | None) -> None:
    runs = named_folders(arguments.result, "RESULT")
    from ..own_model.scales_before_after import result_of, spread_run
    from ..report.frames import own_models
    from ..training.gpu_slots import device_slot
    from ..training.run_lock import run_lock
    from .own_model import quiet

    quiet()
    for run in runs.values():
        result_of(run)  # refuses a wrong folder before `run_lock` creates a file there
    tokens, chosen = arguments.scale_tokens or _SCALE_TOKENS, arguments.device or "auto"
    for run in runs.values():
        out = run / "spread.json"
        if arguments.scale_tokens is None and out.is_file():
            continue  # measured before; `collect` refuses scales of other weights
        with device_slot(chosen, arguments.jobs_per_gpu or 1), run_lock(run):
            spread_run(run, out, tokens=tokens, device=chosen, threads=arguments.threads or 1)
    gathered = own_models.collect(runs, run=arguments.run, caption=arguments.caption or "")
    with writes(arguments, *(Path(file).name for file in OWN_FILES)):
        own_models.write(gathered, arguments.out)


_JOB, _DEVICE = ("config", "job", "set"), ("device", "jobs_per_gpu", "threads")
_KINDS = {  # pattern of the name, whose group is the stage -> kind
    "training": _Kind(("result", "run"), _training),
    "gpt2": _Kind(("result", "run"), _gpt2),
    "int8": _Kind(("result", "run", "tokens"), _int8, ("threads",)),
    "provenance": _Kind(("result", "run"), _provenance),
    "study_S3": _Kind(("result",), _trials, _JOB),
    f"study_S3_({_STAGE})": _Kind(("result",), _trials, _JOB),
    f"study_({_STAGE})_oddities": _Kind(("results", "tokens"), _oddities, (*_JOB, *_DEVICE)),
    f"study_({_STAGE})": _Kind(("results",), _stage, _JOB),
    "tapers": _Kind(("result", "run"), _tapers, ("caption", "scale_tokens", *_DEVICE)),
}
ROWS = {
    "NAME": ", ".join(_shown()),
    "RESULT*": "result.json files and scores of `tapernorm evaluate`; for tapers: NAME=DIR of each run folder",
    "--run RUN": "for training, gpt2, int8, provenance, tapers: name of the run",
    "--caption TEXT": "for tapers: a sentence to print with each table and figure",
    "--results DIR": "for study_STAGE, study_STAGE_oddities: folder of the run's results",
    "--tokens DIR": "for int8, study_STAGE_oddities: token stream that `tapernorm tokens` wrote",
    "--scale-tokens N": f"for tapers: number of held-out tokens to measure scales on; default: {_SCALE_TOKENS}",
    "--device auto|cpu|cuda": f"for study_STAGE_oddities, tapers: {ON_DEVICE}; default: auto",
    "--jobs-per-gpu N": f"for study_STAGE_oddities, tapers: {PER_GPU}; default: 1",
    "--threads CPUS": f"for int8, study_STAGE_oddities, tapers: {THREADS}; default: 1",
    "--out DIR!": "folder to write the CSV files into",
}
