"""Verbs that gather results and show them: rows, table, figure."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..report import catalogue
from .arguments import Verbs, config_options, job_of, options, require_options, writes
from .rows import ROWS, rows
from .runs import drawn_anew

_RESULTS = "results of the run, with its rows; default: results/RUN"


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(rows, "gather finished results into tidy CSV files, which tables and figures are made from", ROWS)
    config_options(made, required=False)
    made = verbs.add(table, "make a table as CSV, Markdown, LaTeX and HTML, from rows")
    config_options(made, required=False)
    options(
        made,
        {
            "NAME": f"{catalogue.names()}; {catalogue.TAPERS}: the tables of tapers of one's own",
            "--results DIR": _RESULTS,
            "--out DIR!": "folder for the table",
        },
    )
    made = verbs.add(
        figure,
        "draw a figure from rows: PDF, PNG, the CSV that it draws, and its caption in Markdown, LaTeX and HTML",
    )
    config_options(made, required=False)
    options(
        made,
        {
            "NAME?": f"{catalogue.names(figure=True)}; {catalogue.TAPERS}: the figures of tapers of one's own",
            "--results DIR": f"{_RESULTS}. With --published: folder of all runs' results; default: results",
            "--out DIR": "folder for the figure",
            "--published RUN": "in place of NAME: make all figures and tables of a published run anew, where they are",
            "--figures DIR": "with --published: folder of all runs' figures; default: figures",
        },
    )


def table(arguments: argparse.Namespace) -> None:
    from ..report import html
    from ..report import table as writer

    for product, made in _made(arguments, figure=False):
        with writes(arguments, *(f"{product.name}.{kind}" for kind in (*product.kinds, "html"))):
            writer.write(made, arguments.out, product.kinds)
            html.write(made, arguments.out)


def figure(arguments: argparse.Namespace) -> None:
    if arguments.published is not None:
        require_options(arguments, "--published", of=("name", "config", "job", "set", "out"))
        results, figures = arguments.results or Path("results"), arguments.figures or Path("figures")
        arguments.written.extend(drawn_anew(arguments.published, results, figures))
        return
    require_options(arguments, "a figure of no --published run", needs=("name", "out"), of=("figures",))
    from ..report import html
    from ..report.figures.figure import save

    for product, drawing in _made(arguments, figure=True):
        with writes(arguments, *(f"{product.name}.{kind}" for kind in (*product.kinds, "html"))):
            save(drawing, arguments.out / product.name)
            html.write_figure(drawing.caption, arguments.out / product.name)


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

    require_options(arguments, "what is made of tapers", needs=("results",), of=("config", "job", "set"))
    return arguments.results, list(own_contents(arguments.results).entries)
