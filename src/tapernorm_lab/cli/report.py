"""Verbs that gather results and show them: rows, table, settings, figure, claims, plan, schema."""

import argparse
from typing import Any

from tapernorm.util.errors import UserError

from ..config.jobs import ClaimsJob, ReportJob, SettingsJob
from ..config.load import json_schema
from ..config.run import Config
from ..report.sources import (
    FIGURES,
    SETTINGS,
    SOURCES,
    TABLES,
)
from .arguments import (
    Verbs,
    figure_files,
    folders,
    job_of,
    path,
    positive_real,
    run_name,
    table_files,
    writes,
)


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(rows, "gather finished runs into tidy CSV files")
    made.add_argument("results", nargs="+", type=path, metavar="RESULT", help="result.json files, evaluations")
    made.add_argument("--gpt2", action="store_true", help="the results are those of the GPT-2 track")
    made.add_argument("--provenance", action="store_true", help="write instead which runs these are: provenance.csv")
    made.add_argument("--run", type=run_name, required=True, help="name of the run")
    folders(made, out="folder for results.csv and curves.csv")

    made = verbs.add(table, "write a table as CSV, Markdown and LaTeX", configured=True)
    made.add_argument("name", choices=tuple(TABLES))
    _sources(made)
    folders(made, out="folder for the table")

    made = verbs.add(settings, "write Table 4 or 5 from a config, its assumptions marked", configured=True)
    made.add_argument("name", choices=tuple(SETTINGS))
    folders(made, out="folder for the table")

    made = verbs.add(figure, "draw a figure as PDF and PNG, with the CSV that it draws", configured=True)
    made.add_argument("name", choices=tuple(FIGURES))
    _sources(made)
    folders(made, out="folder for the figure")

    made = verbs.add(claims, "judge every claim of the paper by what a run measured", configured=True)
    folders(made, rows="folder written by `tapernorm rows`")
    made.add_argument("--gpt2-rows", type=path, metavar="DIR", help="folder written by `tapernorm rows --gpt2`")
    made.add_argument("--bench", type=path, metavar="FILE", help="written by `tapernorm bench decode`")
    made.add_argument("--last-token", type=path, metavar="FILE", help="written by `tapernorm bench last_token`")
    folders(made, out="folder for claims.csv, .md and .html")

    made = verbs.add(plan, "say what a whole run costs: jobs, tokens, FLOPs, disk and hours; instant")
    made.add_argument("--config", required=True, metavar="FILE", help="config of a run, such as config/paper.yaml")
    made.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override one config setting")
    made.add_argument("--flops-per-s", type=positive_real, metavar="F", help="speed of one job, for the hours")
    made.add_argument("--rows", type=path, metavar="DIR", help="written by `tapernorm rows`: speeds of finished runs")

    made = verbs.add(schema, "write the JSON schema that every config is validated against")
    made.add_argument("--out", type=path, required=True, metavar="FILE")


def _sources(made: argparse.ArgumentParser) -> None:
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument("--rows", type=path, metavar="DIR", help="folder written by `tapernorm rows`: training")
    source.add_argument("--bench", type=path, metavar="FILE", help="written by `tapernorm bench`: decoding")


def rows(arguments: argparse.Namespace) -> None:
    from ..report import html, table
    from ..report import provenance as origin
    from ..report.frames import gpt2 as gpt2_rows
    from ..report.frames import pretraining as rows

    if arguments.provenance:
        with writes(arguments.out, "rows", "provenance.csv", "provenance.html"):
            made = origin.provenance_table(origin.collect(arguments.results), run=arguments.run)
            table.write_csv(made, arguments.out)
            html.write(made, arguments.out)
        return
    source = "gpt2" if arguments.gpt2 else "training"
    with writes(arguments.out, "rows", *(f"{frame}.csv" for frame in SOURCES[source].frames)):
        if arguments.gpt2:
            finetunes = [file for file in arguments.results if file.name == "result.json"]
            evaluations = [file for file in arguments.results if file.name != "result.json"]
            gpt2_rows.write(gpt2_rows.collect(evaluations, finetunes, run=arguments.run), arguments.out)
        else:
            rows.write(*rows.collect(arguments.results, run=arguments.run), arguments.out)


def table(arguments: argparse.Namespace) -> None:
    from ..report import catalogue, html, table

    job = job_of(arguments, ReportJob, Config.report_job)
    with writes(arguments.out, "table", *table_files(arguments.name)):
        made = catalogue.make_table(arguments.name, _found(arguments, TABLES[arguments.name], job.run), job)
        table.write(made, arguments.out)
        html.write(made, arguments.out)


def settings(arguments: argparse.Namespace) -> None:
    from ..report import catalogue, html, table

    job = job_of(arguments, SettingsJob, Config.settings_job)
    with writes(arguments.out, "table", *table_files(arguments.name)):
        made = catalogue.make_settings(arguments.name, job)
        table.write(made, arguments.out)
        html.write(made, arguments.out)


def figure(arguments: argparse.Namespace) -> None:
    from ..report import catalogue
    from ..report.figures import figure1_2_curves as figures

    job = job_of(arguments, ReportJob, Config.report_job)
    with writes(arguments.out, "figure", *figure_files(arguments.name)):
        drawing, frame = catalogue.make_figure(arguments.name, _found(arguments, FIGURES[arguments.name], job.run), job)
        figures.save(drawing, frame, arguments.out / arguments.name)


def _found(arguments: argparse.Namespace, source: str, run: str) -> Any:
    """What a table or figure is made from, read where --rows or --bench says."""
    from ..report import catalogue

    option = SOURCES[source].option
    given = getattr(arguments, option)
    if given is None:
        raise UserError(f"{arguments.name} is made from --{option}: name it")
    return catalogue.read(source, given, run=run)


def claims(arguments: argparse.Namespace) -> None:
    from tapernorm.util.atomic_files import write_text

    from ..report import catalogue, html, table

    job = job_of(arguments, ClaimsJob, Config.claims_job)
    places = {"training": arguments.rows, "gpt2": arguments.gpt2_rows}
    places |= {"decode": arguments.bench, "last_token": arguments.last_token}
    with writes(arguments.out, "claims", "claims.csv", "claims.md", "claims.html"):
        found = {source: catalogue.read(source, place, run=job.run) for source, place in places.items() if place}
        made = catalogue.make_claims(job, found)
        table.write_csv(made, arguments.out)
        write_text(arguments.out / "claims.md", table.markdown(made))
        html.write(made, arguments.out)


def plan(arguments: argparse.Namespace) -> None:
    from ..config.load import load_config
    from ..config.run_cost import Speed, cost_text, measured_tokens_per_s

    config = load_config(arguments.config, arguments.set)
    measured = measured_tokens_per_s(arguments.rows / "results.csv") if arguments.rows else {}
    print(cost_text(config, Speed(arguments.flops_per_s, measured)))


def schema(arguments: argparse.Namespace) -> None:
    from tapernorm.util.atomic_files import write_text

    with writes(arguments.out, "schema"):
        write_text(arguments.out, json_schema())
