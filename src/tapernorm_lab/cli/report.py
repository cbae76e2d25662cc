"""Verbs that gather results and show them: rows, table, figure."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapernorm.util.errors import UserError

from ..report.products import CLAIMS, Job, Product, figure_named, table_named
from ..report.sources import FIGURES, SETTINGS, SOURCES, TABLES
from .arguments import Verbs, config_options, folders, job_of, path, run_name, writes
from .rows import add_rows
from .runs import drawn_anew

if TYPE_CHECKING:
    from ..report.catalogue import Drawing, Rows
    from ..report.table import Table

TAPERS = "tapers"  # of one's own: all tables, or all figures, of rows that no config describes


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    add_rows(verbs)

    made = verbs.add(table, "make a table as CSV, Markdown and LaTeX, from rows")
    made.add_argument(
        "name",
        metavar="NAME",
        help=f"{', '.join([*TABLES, *SETTINGS, CLAIMS])}, table_STAGE, table_STAGE_oddities, table_S3, table_S3x or "
        f"table_S3_STAGE; {TAPERS}: the tables of tapers of one's own",
    )
    config_options(made, required=False)
    _results(made)
    folders(made, out="folder for the table")

    made = verbs.add(figure, "draw a figure as PDF and PNG, with the CSV that it draws, from rows")
    made.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help=f"{', '.join(FIGURES)}, figure_STAGE or figure_S3; {TAPERS}: the figures of tapers of one's own",
    )
    config_options(made, required=False)
    _results(made, ". With --published: folder of all runs' results; default: results")
    made.add_argument("--out", metavar="DIR", type=path, help="folder for the figure")
    made.add_argument(
        "--published",
        metavar="RUN",
        type=run_name,
        help="in place of NAME: make all figures and tables of a published run anew, where they are",
    )
    made.add_argument("--figures", type=path, metavar="DIR", help="with --published: folder of all runs' figures")


def _results(made: argparse.ArgumentParser, more: str = "") -> None:
    made.add_argument(
        "--results", type=path, metavar="DIR", help=f"results of the run, with its rows; default: results/RUN{more}"
    )


def table(arguments: argparse.Namespace) -> None:
    from tapernorm.util.atomic_files import write_text

    from ..report import html
    from ..report import table as writer

    for made in _tables(arguments):
        kinds = ("csv", "md", "html") if made.name == CLAIMS else ("csv", "md", "tex", "html")
        with writes(arguments.out, "table", *(f"{made.name}.{kind}" for kind in kinds)):
            if made.name == CLAIMS:
                writer.write_csv(made, arguments.out)
                write_text(arguments.out / f"{CLAIMS}.md", writer.markdown(made))
            else:
                writer.write(made, arguments.out)
            html.write(made, arguments.out)


def figure(arguments: argparse.Namespace) -> None:
    if arguments.published is not None:
        given = {"NAME": arguments.name, "--config": arguments.config, "--job": arguments.job, "--out": arguments.out}
        if wrong := [
            option for option, value in (given | {"--set": arguments.set or None}).items() if value is not None
        ]:
            raise UserError(f"--published makes all figures and tables of a run, where they are: leave {wrong[0]} out")
        drawn_anew(arguments.published, arguments.results or Path("results"), arguments.figures or Path("figures"))
        return
    if arguments.name is None or arguments.out is None:
        raise UserError("name a figure and its folder with --out, or give --published RUN")
    if arguments.figures is not None:
        raise UserError("--figures: only with --published")
    from ..report.figures import figure1_2_curves as writer

    for name, (drawing, frame) in _drawings(arguments).items():
        with writes(arguments.out, "figure", *(f"{name}.{kind}" for kind in ("pdf", "png", "csv"))):
            writer.save(drawing, frame, arguments.out / name)


def _tables(arguments: argparse.Namespace) -> "list[Table]":
    from ..report import catalogue

    if arguments.name == TAPERS:
        found = _rows_of_tapers(arguments)
        entries = [entry for entry in catalogue.own_entries(found.own.runs) if not entry.is_figure]
        return [made for entry in entries for made in _list(entry.make(found))]
    name, job, found = arguments.name, *_job_and_rows(arguments, table_named(arguments.name))
    if name in TABLES:
        return [catalogue.make_table(name, found.of(TABLES[name]), job)]
    if name in SETTINGS:
        return [catalogue.make_settings(name, job)]
    if name == CLAIMS:
        return [catalogue.make_claims(job, _measured(found))]
    return _tables_of_study(name, job, found)


def _tables_of_study(name: str, job: Any, found: "Rows") -> "list[Table]":
    from ..report.frames import decoding, inference_graph, odd_inputs, study_stages
    from ..report.tables import inference_graph as graph_table
    from ..report.tables import odd_inputs as odd_tables
    from ..report.tables import study_stages as stage_tables

    needs = [found.results / file for file in table_named(name).needs]
    if name.startswith("table_S3"):
        rows = odd_inputs.read(needs[0].parent, run=job.run, name=job.name)
        odd_inputs.require(rows, job)
        return [made for made in odd_tables.tables(rows, job) if made.name == name]
    if name.endswith("_oddities"):
        bench = decoding.read(needs[1], kind=decoding.RIVALS) if needs[1].is_file() else None
        return [graph_table.oddities_table(inference_graph.read(needs[0], job), bench, job)]
    return [stage_tables.stage_table(study_stages.read(needs[0], job), job)]


def _drawings(arguments: argparse.Namespace) -> "Mapping[str, Drawing]":
    from ..report import catalogue
    from ..report.figures import odd_inputs as odd_figure
    from ..report.frames import odd_inputs, study_stages

    if arguments.name == TAPERS:
        found = _rows_of_tapers(arguments)
        entries = [entry for entry in catalogue.own_entries(found.own.runs) if entry.is_figure]
        return {entry.names[0]: _pair(entry.make(found)) for entry in entries}
    product = figure_named(arguments.name)
    name, job, found = arguments.name, *_job_and_rows(arguments, product)
    if name in FIGURES:
        return {name: catalogue.make_figure(name, found.of(FIGURES[name]), job)}
    place = found.results / product.needs[0]
    if name == "figure_S3":
        rows = odd_inputs.read(place.parent, run=job.run, name=job.name)
        odd_inputs.require(rows, job)
        return {name: odd_figure.figure_s3(rows, run=job.run, caption=job.caption)}
    return {name: catalogue.make_stage_figure(study_stages.read(place, job), job)}


def _job_and_rows(arguments: argparse.Namespace, product: Product) -> "tuple[Any, Rows]":
    """The job of a table or figure, and the rows of its run."""
    from ..report.catalogue import Rows

    job: Job = job_of(arguments, product.kind, product.cut)
    product.require_job(job, arguments.name)
    return job, Rows(arguments.results or Path("results", job.run), job.run)


def _rows_of_tapers(arguments: argparse.Namespace) -> "Rows":
    from ..report.catalogue import Rows

    if arguments.config is not None or arguments.job is not None:
        raise UserError(f"{TAPERS}: no config describes tapers of one's own: leave --config and --job out")
    if arguments.results is None:
        raise UserError(
            f"{TAPERS} are made from --results: name the folder whose rows/ `tapernorm rows {TAPERS}` wrote"
        )
    return Rows(arguments.results, "")


def _measured(found: "Rows") -> dict[str, Any]:
    """The rows of each source that the run has; those of its training it must have."""
    from ..report.read_json import stored

    there = [
        source
        for source, of in SOURCES.items()
        if source == "training" or all(stored(found.results / file).is_file() for file in of.files)
    ]
    return {source: found.of(source) for source in there}


def _list(made: "list[Table] | Drawing") -> "list[Table]":
    assert isinstance(made, list)
    return made


def _pair(made: "list[Table] | Drawing") -> "Drawing":
    assert isinstance(made, tuple)
    return made
