"""Verb of the second half of Table S2: oddities."""

import argparse

from tapernorm.util.errors import UserError

from ..config.study_runs import StageJob, stage_job
from ..training.gpu_slots import device_slot
from .arguments import (
    Verbs,
    cell_of,
    device,
    job_of,
    path,
    slots,
    table_files,
    threads,
    writes,
)


def add(verbs: Verbs) -> None:
    """Add it to the command line."""
    made = verbs.add(
        oddities, "try the models of a study's stage on odd inputs, or make the table of that", configured=True
    )
    made.add_argument("what", choices=("rows", "table"))
    made.add_argument("--stage", metavar="NAME", help="with --config: which stage of the study")
    made.add_argument("--results", type=path, metavar="DIR", help="rows: results folder of the run, as results/cpu")
    made.add_argument("--tokens", type=path, metavar="DIR", help="rows: folder written by `tapernorm tokens`")
    made.add_argument("--rows", type=path, metavar="FILE", help="table: written by `tapernorm oddities rows`")
    made.add_argument(
        "--bench", type=path, metavar="FILE", help="table: written by `tapernorm bench rivals`, if at all"
    )
    device(made)
    slots(made)
    threads(made)
    made.add_argument("--out", type=path, required=True, metavar="PATH", help="rows: CSV file; else the folder")


def oddities(arguments: argparse.Namespace) -> None:
    (name,) = cell_of(arguments, "stage")
    job = job_of(arguments, StageJob, lambda config: stage_job(config, name))
    needed = {"rows": ("results", "tokens"), "table": ("rows",)}[arguments.what]
    for option in needed:
        if getattr(arguments, option) is None:
            raise UserError(f"oddities {arguments.what} is made from --{option}: name it")
    from ..report.frames import inference_graph as oddities_rows

    if arguments.what == "rows":
        with device_slot(arguments.device, arguments.jobs_per_gpu):
            from ..experiments.speed.inference_graph_of_stage import stage_oddities

            rows = stage_oddities(
                job, arguments.results, arguments.tokens, device=arguments.device, threads=arguments.threads
            )
        with writes(arguments.out, "oddities"):
            oddities_rows.write(rows, arguments.out)
        return
    from ..report import html, table
    from ..report.frames import decoding as decode_rows
    from ..report.tables import inference_graph as oddities_table

    rows = oddities_rows.read(arguments.rows, job)
    bench = None if arguments.bench is None else decode_rows.read(arguments.bench, kind=decode_rows.RIVALS)
    made = oddities_table.oddities_table(rows, bench, job)
    with writes(arguments.out, "oddities", *table_files(made.name)):
        table.write(made, arguments.out)
        html.write(made, arguments.out)
