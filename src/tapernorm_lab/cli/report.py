"""The verbs that gather and show results: rows, table, figure."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..report import catalogue
from .arguments import Verbs, config_options, job_of, options, require_options, writes
from .rows import ROWS, rows
from .runs import drawn_anew

_RESULTS = "folder of the run's results, with its rows; default: results/RUN"


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(rows, "gather finished results into the CSV files that tables and figures are made from", ROWS)
    config_options(made, required=False)
    made = verbs.add(table, "make a table from rows, as CSV, Markdown, LaTeX and HTML")
    config_options(made, required=False)
    options(
        made,
        {
            "NAME": f"{catalogue.names()}; or {catalogue.TAPERS}: all tables of runs of `tapernorm taper`",
            "--results DIR": _RESULTS,
            "--out DIR!": "folder to write the table into",
        },
    )
    made = verbs.add(
        figure,
        "draw a figure from rows, as PDF, PNG and CSV, with its caption as Markdown, LaTeX and HTML",
    )
    config_options(made, required=False)
    options(
        made,
        {
            "NAME?": f"{catalogue.names(figure=True)}; or {catalogue.TAPERS}: all figures of runs of `tapernorm taper`",
            "--results DIR": f"{_RESULTS}; with --published: folder of the results of all runs, default: results",
            "--out DIR": "folder to write the figure into",
            "--published RUN": "in place of NAME: remake all figures and tables of this published run in place",
            "--figures DIR": "with --published: folder of the figures of all runs; default: figures",
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
    require_options(arguments, "figure without --published", needs=("name", "out"), of=("figures",))
    from ..report import html
    from ..report.figures.figure import save

    for product, drawing in _made(arguments, figure=True):
        with writes(arguments, *(f"{product.name}.{kind}" for kind in (*product.kinds, "html"))):
            save(drawing, arguments.out / product.name)
            html.write_figure(drawing.caption, arguments.out / product.name)


def _made(arguments: argparse.Namespace, *, figure: bool) -> Iterator[tuple[catalogue.Product, Any]]:
    """Make the tables, or the figures, of the name that the user gave."""
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
    """Return the results folder of runs of `tapernorm taper`, and all products made from it."""
    from ..report.parts import own_contents

    require_options(arguments, "NAME tapers", needs=("results",), of=("config", "job", "set"))
    return arguments.results, list(own_contents(arguments.results).entries)
