"""The verb that reports a stage of a study: its rows, then its table and its figure from these alone."""

import argparse
from pathlib import Path

from tapernorm.util.errors import UserError

from ..config.study_runs import StageJob, stage_job
from .arguments import (
    Verbs,
    cell_of,
    figure_files,
    job_of,
    path,
    table_files,
    writes,
)


def add(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    made = verbs.add(stage, "gather a stage of a study into rows, or make its table or figure of them", configured=True)
    made.add_argument("what", choices=("rows", "table", "figure"))
    made.add_argument("--stage", metavar="NAME", help="with --config: which stage of the study")
    made.add_argument("--results", type=path, metavar="DIR", help="rows: results folder of the run, as results/cpu")
    made.add_argument("--rows", type=path, metavar="FILE", help="table, figure: written by `tapernorm stage rows`")
    made.add_argument("--out", type=path, required=True, metavar="PATH", help="rows: CSV file; else the folder")


def stage(arguments: argparse.Namespace) -> None:
    (name,) = cell_of(arguments, "stage")
    job = job_of(arguments, StageJob, lambda config: stage_job(config, name))
    from ..report.frames import study_stages as study_rows

    if arguments.what == "rows":
        with writes(arguments.out, "stage"):
            study_rows.write(study_rows.collect(job, _needed(arguments, "results")), arguments.out)
        return
    rows = study_rows.read(_needed(arguments, "rows"), job)
    if arguments.what == "table":
        from ..report import html, table
        from ..report.tables import study_stages as study_tables

        made = study_tables.stage_table(rows, job)
        with writes(arguments.out, "stage", *table_files(made.name)):
            table.write(made, arguments.out)
            html.write(made, arguments.out)
    else:
        from ..report import catalogue
        from ..report.figures import figure1_2_curves as figures

        drawing, frame = catalogue.make_stage_figure(rows, job)
        name = f"figure_{job.stage.name}"
        with writes(arguments.out, "stage", *figure_files(name)):
            figures.save(drawing, frame, arguments.out / name)


def _needed(arguments: argparse.Namespace, option: str) -> Path:
    given = getattr(arguments, option)
    if given is None:
        raise UserError(f"stage {arguments.what} is made from --{option}: name it")
    return given
