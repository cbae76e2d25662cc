"""Verbs that gather results and show them: rows, table, figure."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tapernorm.util.errors import UserError

from ..report import catalogue
from .arguments import Verbs, config_options, folders, job_of, path, run_name, writes
from .rows import add_rows
from .runs import drawn_anew


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    add_rows(verbs)

    made = verbs.add(table, "make a table as CSV, Markdown and LaTeX, from rows")
    made.add_argument(
        "name",
        metavar="NAME",
        help=f"{catalogue.names()}; {catalogue.TAPERS}: the tables of tapers of one's own",
    )
    config_options(made, required=False)
    _results(made)
    folders(made, out="folder for the table")

    made = verbs.add(figure, "draw a figure as PDF and PNG, with the CSV that it draws, from rows")
    made.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help=f"{catalogue.names(figure=True)}; {catalogue.TAPERS}: the figures of tapers of one's own",
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
    from ..report import html
    from ..report import table as writer

    for product, made in _made(arguments, figure=False):
        with writes(arguments.out, "table", *(f"{product.name}.{kind}" for kind in (*product.kinds, "html"))):
            writer.write(made, arguments.out, product.kinds)
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

    for product, (drawing, frame) in _made(arguments, figure=True):
        with writes(arguments.out, "figure", *(f"{product.name}.{kind}" for kind in product.kinds)):
            writer.save(drawing, frame, arguments.out / product.name)


def _made(arguments: argparse.Namespace, *, figure: bool) -> Iterator[tuple[catalogue.Product, Any]]:
    """The tables, or the figures, of this name."""
    from ..report.makers import Rows, make

    if arguments.name == catalogue.TAPERS:
        results, products = _tapers(arguments)
        products = [product for product in products if product.is_figure == figure]
    else:
        product = catalogue.named(arguments.name, figure=figure)
        job = job_of(arguments, product.job_class, product.cut)
        products, results = [product.told_by(job)], arguments.results or Path("results", job.run)
    found = Rows(results)
    return ((product, make(product, found)) for product in products)


def _tapers(arguments: argparse.Namespace) -> tuple[Path, list[catalogue.Product]]:
    """The results of tapers of one's own, and all that is made of them."""
    from ..report.parts import own_contents

    if arguments.config is not None or arguments.job is not None:
        raise UserError("tapers: no config describes tapers of one's own: leave --config and --job out")
    if arguments.results is None:
        raise UserError("tapers are made from --results: name the folder whose rows/ `tapernorm rows tapers` wrote")
    return arguments.results, list(own_contents(arguments.results).entries)
