"""The verb that gathers finished results into tidy CSV files: rows."""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapernorm.util.errors import UserError

from ..config.odd_inputs import OddInputsReportJob
from ..config.study_runs import StageJob, stage_job
from ..report.catalogue import OWN_FILES, SOURCES
from .arguments import (
    Verbs,
    config_options,
    device,
    folders,
    job_of,
    named_folders,
    path,
    positive,
    run_name,
    slots,
    threads,
    writes,
)

_STAGE = "[A-Za-z][A-Za-z0-9]*"
_JOB = "--config or --job"
_SCALE_TOKENS = 8192


@dataclass(frozen=True)
class _Kind:
    """Rows of one kind.

    Attributes:
        needs: the options that they are gathered by.
        gather: writes them into --out; takes the stage of the study that their name names, if it names one.
        may: options that they take besides.
    """

    needs: Sequence[str]
    gather: Callable[[argparse.Namespace, str | None], None]
    may: Sequence[str] = ()


def add_rows(verbs: Verbs) -> None:
    """Add the verb to the command line."""
    made = verbs.add(rows, "gather finished results into tidy CSV files, which tables and figures are made from")
    made.add_argument("name", metavar="NAME", help=", ".join(_shown()))
    made.add_argument(
        "found",
        nargs="*",
        metavar="RESULT",
        help="result.json files and scores of `tapernorm evaluate`; tapers: NAME=DIR of each run folder",
    )
    made.add_argument("--run", type=run_name, metavar="RUN", help="training, gpt2, provenance, tapers: name of the run")
    made.add_argument("--caption", metavar="TEXT", help="tapers: a sentence for each table and figure")
    config_options(made, required=False)
    made.add_argument("--results", type=path, metavar="DIR", help="study_STAGE, study_STAGE_oddities: of the run")
    made.add_argument("--tokens", type=path, metavar="DIR", help="study_STAGE_oddities: written by `tapernorm tokens`")
    made.add_argument(
        "--scale-tokens",
        type=positive,
        metavar="N",
        help=f"tapers: held-out tokens that scales are measured on; default {_SCALE_TOKENS}",
    )
    device(made)
    slots(made)
    threads(made)
    made.set_defaults(device=None, jobs_per_gpu=None, threads=None)
    folders(made, out="folder for the CSV files")


def rows(arguments: argparse.Namespace) -> None:
    kind, stage = _kind_of(arguments.name)
    given = {"RESULT": arguments.found, _JOB: arguments.config if arguments.job is None else arguments.job}
    given |= {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in _OPTIONS}
    if missing := [option for option in kind.needs if not given[option]]:
        raise UserError(f"rows {arguments.name} is made from {', '.join(missing)}: name it")
    if wrong := [option for option, value in given.items() if value and option not in (*kind.needs, *kind.may)]:
        raise UserError(f"rows {arguments.name} takes no {', '.join(wrong)}")
    kind.gather(arguments, stage)


def _kind_of(name: str) -> tuple[_Kind, str | None]:
    for pattern, kind in _KINDS.items():
        if found := re.fullmatch(pattern, name):
            return kind, found[1] if found.groups() else None
    raise UserError(f"no rows {name!r}; there are {', '.join(_shown())}")


def _shown() -> list[str]:
    return [re.sub(r"\(.*?\)", "STAGE", pattern) for pattern in _KINDS]


def _paths(arguments: argparse.Namespace) -> list[Path]:
    return [Path(file) for file in arguments.found]


def _training(arguments: argparse.Namespace, _: str | None) -> None:
    from ..report.frames import pretraining

    with writes(arguments.out, "rows", *(Path(file).name for file in SOURCES["training"].files)):
        pretraining.write(*pretraining.collect(_paths(arguments), run=arguments.run), arguments.out)


def _gpt2(arguments: argparse.Namespace, _: str | None) -> None:
    from ..report.frames import gpt2

    finetunes = [file for file in _paths(arguments) if file.name == "result.json"]
    evaluations = [file for file in _paths(arguments) if file.name != "result.json"]
    with writes(arguments.out, "rows", *(Path(file).name for file in SOURCES["gpt2"].files)):
        gpt2.write(gpt2.collect(evaluations, finetunes, run=arguments.run), arguments.out)


def _provenance(arguments: argparse.Namespace, _: str | None) -> None:
    from ..report import html, provenance, table

    with writes(arguments.out, "rows", "provenance.csv", "provenance.html"):
        made = provenance.provenance_table(provenance.collect(_paths(arguments)), run=arguments.run)
        table.write_csv(made, arguments.out)
        html.write(made, arguments.out)


def _stage(arguments: argparse.Namespace, stage: str | None) -> None:
    job = _stage_job(arguments, stage)
    from ..report.frames import study_stages

    out = arguments.out / Path(SOURCES["stage"].at(stage or "")[0]).name
    with writes(out, "rows"):
        study_stages.write(study_stages.collect(job, arguments.results), out)


def _oddities(arguments: argparse.Namespace, stage: str | None) -> None:
    job = _stage_job(arguments, stage)
    from ..report.frames import inference_graph
    from ..training.gpu_slots import device_slot

    out = arguments.out / Path(SOURCES["oddities"].at(stage or "")[0]).name
    chosen = arguments.device or "auto"
    with device_slot(chosen, arguments.jobs_per_gpu or 1):
        from ..experiments.speed.inference_graph import inspect_stage

        found = inspect_stage(job, arguments.results, arguments.tokens, device=chosen, threads=arguments.threads or 1)
    with writes(out, "rows"):
        inference_graph.write(found, out)


def _stage_job(arguments: argparse.Namespace, stage: str | None) -> StageJob:
    assert stage is not None
    job = job_of(arguments, StageJob, lambda config: stage_job(config, stage))
    if job.stage.name != stage:
        raise UserError(f"rows {arguments.name} is about stage {stage}, and --job about stage {job.stage.name}")
    return job


def _trials(arguments: argparse.Namespace, stage: str | None) -> None:
    job = job_of(arguments, OddInputsReportJob, lambda config: config.odd_inputs_report_job(stage))
    if job.stage != stage:
        raise UserError(f"rows {arguments.name} and --job, which names rows study_{job.name}, do not go together")
    from ..report.frames import odd_inputs

    found = odd_inputs.collect(_paths(arguments), run=job.run)
    odd_inputs.require(found, job)
    with writes(arguments.out, "rows", *(file.name for file in odd_inputs.files(arguments.out, job.name).values())):
        odd_inputs.write(found, arguments.out, name=job.name)


def _tapers(arguments: argparse.Namespace, _: str | None) -> None:
    runs = named_folders(arguments.found, "RESULT")
    from ..own_model.scales_before_after import result_of, spread_run
    from ..report.frames import own_models
    from ..training.gpu_slots import device_slot
    from ..training.run_lock import run_lock
    from .own_model import quiet

    quiet()
    for run in runs.values():
        result_of(run)  # refused before a lock makes a folder
    tokens, chosen = arguments.scale_tokens or _SCALE_TOKENS, arguments.device or "auto"
    for run in runs.values():
        out = run / "spread.json"
        if arguments.scale_tokens is None and out.is_file():
            continue  # measured before; rows of other weights are refused below
        with device_slot(chosen, arguments.jobs_per_gpu or 1), run_lock(run):
            spread_run(run, out, tokens=tokens, device=chosen, threads=arguments.threads or 1)
    gathered = own_models.collect(runs, run=arguments.run, caption=arguments.caption or "")
    with writes(arguments.out, "rows", *(Path(file).name for file in OWN_FILES)):
        own_models.write(gathered, arguments.out)


_DEVICE = ("--device", "--jobs-per-gpu", "--threads")
_OPTIONS = ("run", "caption", "results", "tokens", "scale_tokens", "device", "jobs_per_gpu", "threads")
_KINDS = {  # name, with a group where it names a stage -> how its rows are gathered
    "training": _Kind(("RESULT", "--run"), _training),
    "gpt2": _Kind(("RESULT", "--run"), _gpt2),
    "provenance": _Kind(("RESULT", "--run"), _provenance),
    "study_S3": _Kind(("RESULT", _JOB), _trials),
    f"study_S3_({_STAGE})": _Kind(("RESULT", _JOB), _trials),
    f"study_({_STAGE})_oddities": _Kind((_JOB, "--results", "--tokens"), _oddities, _DEVICE),
    f"study_({_STAGE})": _Kind((_JOB, "--results"), _stage),
    "tapers": _Kind(("RESULT", "--run"), _tapers, ("--caption", "--scale-tokens", *_DEVICE)),
}
