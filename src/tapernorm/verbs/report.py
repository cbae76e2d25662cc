"""Verbs that gather results and show them: rows, table, settings, figure, claims, plan, schema."""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

from ..config import Config
from ..configfile import json_schema
from ..errors import UserError
from ..jobs import ClaimsJob, ReportJob, SettingsJob
from .arguments import Verbs, folders, job_of, positive, real, run_name

_DECODE_TABLES = ("table2", "table2x", "table2v1")
_GPT2_TABLES = ("table3", "table3x")
_TRAINING_FIGURES = ("figure1a", "figure1b", "figure2")


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(rows, "gather finished runs into tidy CSV files")
    made.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="result.json files, evaluations")
    made.add_argument("--gpt2", action="store_true", help="the results are those of the GPT-2 track")
    made.add_argument("--provenance", action="store_true", help="write instead which runs these are: provenance.csv")
    made.add_argument("--run", type=run_name, required=True, help="name of the run")
    folders(made, out="folder for results.csv and curves.csv")

    made = verbs.add(table, "write a table as CSV, Markdown and LaTeX", configured=True)
    made.add_argument("name", choices=("table1", *_DECODE_TABLES, *_GPT2_TABLES))
    _sources(made)
    folders(made, out="folder for the table")

    made = verbs.add(settings, "write Table 4 or 5 from a config, its assumptions marked", configured=True)
    made.add_argument("name", choices=("table4", "table5"))
    folders(made, out="folder for the table")

    made = verbs.add(figure, "draw a figure as PDF and PNG, with the CSV that it draws", configured=True)
    made.add_argument("name", choices=(*_TRAINING_FIGURES, "figure_decode", "figure_finetune"))
    _sources(made)
    folders(made, out="folder for the figure")

    made = verbs.add(claims, "judge every claim of the paper by what a run measured", configured=True)
    folders(made, rows="folder written by `tapernorm rows`")
    made.add_argument("--gpt2-rows", type=Path, metavar="DIR", help="folder written by `tapernorm rows --gpt2`")
    made.add_argument("--bench", type=Path, metavar="FILE", help="written by `tapernorm bench decode`")
    made.add_argument("--last-token", type=Path, metavar="FILE", help="written by `tapernorm bench last_token`")
    folders(made, out="folder for claims.csv, .md and .html")

    made = verbs.add(plan, "say what a whole run costs: jobs, tokens, FLOPs, disk and hours; instant")
    made.add_argument("--config", required=True, metavar="FILE", help="config of a run, such as config/paper.yaml")
    made.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override one config setting")
    made.add_argument(
        "--gpus",
        type=positive,
        metavar="N",
        help="that the run may use; default: 1, or for device auto those found here",
    )
    made.add_argument("--cores", type=positive, default=2, metavar="N", help="CPU cores, for a run without GPUs")
    made.add_argument("--step-s", type=real(0), metavar="S", help="measured overhead of one forward and backward pass")
    made.add_argument("--flops-per-s", type=real(0, above=True), metavar="F", help="measured speed of one eager job")
    made.add_argument("--rows", type=Path, metavar="DIR", help="written by `tapernorm rows`: speeds of finished runs")

    made = verbs.add(schema, "write the JSON schema that every config is validated against")
    made.add_argument("--out", type=Path, required=True, metavar="FILE")


def _sources(made: argparse.ArgumentParser) -> None:
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument("--rows", type=Path, metavar="DIR", help="folder written by `tapernorm rows`: training")
    source.add_argument("--bench", type=Path, metavar="FILE", help="written by `tapernorm bench`: decoding")


def rows(arguments: argparse.Namespace) -> None:
    from ..report import gpt2_rows, html, origin, rows, table

    if arguments.provenance:
        made = origin.provenance_table(origin.collect(arguments.results), run=arguments.run)
        table.write_csv(made, arguments.out)
        html.write(made, arguments.out)
        return
    if arguments.gpt2:
        finetunes = [path for path in arguments.results if path.name == "result.json"]
        evaluations = [path for path in arguments.results if path.name != "result.json"]
        gpt2_rows.write(gpt2_rows.collect(evaluations, finetunes, run=arguments.run), arguments.out)
    else:
        rows.write(*rows.collect(arguments.results, run=arguments.run), arguments.out)


def table(arguments: argparse.Namespace) -> None:
    from ..report import decode_rows, decode_tables, gpt2_rows, gpt2_tables, html, rows, table, tables

    job = job_of(arguments, ReportJob, Config.report_job)
    if arguments.name == "table1":
        results, _ = rows.read(_source(arguments, "rows"))
        _require_run(job.run, results["run"])
        made = tables.table1(results, run=job.run, caption=job.caption, labels=job.labels)
    elif arguments.name in _GPT2_TABLES:
        scores = gpt2_rows.read(_source(arguments, "rows")).scores
        _require_run(job.run, scores["run"])
        make = {"table3": gpt2_tables.table3, "table3x": gpt2_tables.table3x}
        made = make[arguments.name](scores, run=job.run, caption=job.caption)
    else:
        kind = decode_rows.LAST_TOKEN if arguments.name == "table2v1" else decode_rows.DECODE
        measured = decode_rows.read(_source(arguments, "bench"), kind=kind)
        make = {"table2": decode_tables.table2, "table2x": decode_tables.table2x, "table2v1": decode_tables.table2v1}
        made = make[arguments.name](measured, run=job.run, caption=job.caption)
    table.write(made, arguments.out)
    html.write(made, arguments.out)


def settings(arguments: argparse.Namespace) -> None:
    from ..report import html, settings_tables, table

    job = job_of(arguments, SettingsJob, Config.settings_job)
    make = {"table4": settings_tables.table4, "table5": settings_tables.table5}
    made = make[arguments.name](job)
    table.write(made, arguments.out)
    html.write(made, arguments.out)


def figure(arguments: argparse.Namespace) -> None:
    from ..report import decode_figure, decode_rows, figures, gpt2_figure, gpt2_rows, rows

    job = job_of(arguments, ReportJob, Config.report_job)
    if arguments.name == "figure_decode":
        measured = decode_rows.read(_source(arguments, "bench"))
        drawing, frame = decode_figure.figure_decode(measured, run=job.run, caption=job.caption)
    elif arguments.name == "figure_finetune":
        known = gpt2_rows.read(_source(arguments, "rows"))
        _require_run(job.run, known.scores["run"])
        drawing, frame = gpt2_figure.figure_finetune(known.curves, known.removals, run=job.run, caption=job.caption)
    else:
        results, curves = rows.read(_source(arguments, "rows"))
        _require_run(job.run, results["run"])
        make = {"figure1a": figures.figure1a, "figure1b": figures.figure1b, "figure2": figures.figure2}
        drawing, frame = make[arguments.name](curves, run=job.run, caption=job.caption, labels=job.labels)
    figures.save(drawing, frame, arguments.out / arguments.name)


def claims(arguments: argparse.Namespace) -> None:
    from ..files import write_text
    from ..report import claims, decode_rows, gpt2_rows, gpt2_summary, html, rows, table

    job = job_of(arguments, ClaimsJob, Config.claims_job)
    results, curves = rows.read(arguments.rows)
    _require_run(job.run, results["run"])
    gpt2 = gpt2_rows.read(arguments.gpt2_rows).scores if arguments.gpt2_rows else None
    if gpt2 is not None:
        _require_run(job.run, gpt2["run"])
    last_token = arguments.last_token and decode_rows.read(arguments.last_token, kind=decode_rows.LAST_TOKEN)
    measured = claims.Measured(
        results=results,
        curves=curves,
        text=job.text,
        decode=decode_rows.read(arguments.bench) if arguments.bench else None,
        last_token=last_token,
        gpt2=None if gpt2 is None else gpt2_summary.table3_rows(gpt2, run=job.run),
    )
    made = claims.claims_table(measured, run=job.run, caption=job.caption)
    table.write_csv(made, arguments.out)
    write_text(arguments.out / "claims.md", table.markdown(made))
    html.write(made, arguments.out)


def plan(arguments: argparse.Namespace) -> None:
    from ..configfile import load_config
    from ..devices import visible_devices
    from ..plan import plan_of
    from ..plantext import plan_text
    from ..speeds import EAGER, measured_speeds

    config = load_config(arguments.config, arguments.set)
    speeds = EAGER.given(step_s=arguments.step_s, flops_per_s=arguments.flops_per_s)
    measured = measured_speeds(arguments.rows / "results.csv") if arguments.rows else {}
    here = len(visible_devices(os.environ)) if config.hardware.device == "auto" else 1
    gpus = here if arguments.gpus is None else arguments.gpus
    made = plan_of(config, gpus=gpus, speeds=speeds, measured=measured)
    print(plan_text(config, made, cores=arguments.cores))


def _require_run(run: str, runs: Iterable[str]) -> None:
    """Rows of one run are never printed under the name of another."""
    if others := set(runs) - {run}:
        raise UserError(f"the rows are of run {', '.join(sorted(others))} and the config is of run {run!r}")


def _source(arguments: argparse.Namespace, option: str) -> Path:
    """Where a table or figure gets its numbers: --rows for training, --bench for decoding."""
    given = getattr(arguments, option)
    if given is None:
        raise UserError(f"{arguments.name} is made from --{option}: name it")
    return given


def schema(arguments: argparse.Namespace) -> None:
    from ..files import write_text

    write_text(arguments.out, json_schema())
