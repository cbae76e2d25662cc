"""Verbs of published runs: publish, redraw, compare."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tapernorm.util.errors import UserError

from ..config.load import load_config
from .arguments import Verbs, path, run_name

if TYPE_CHECKING:
    from ..report.parts import Contents

PUBLISHED = "published"  # below the folders of results and of figures


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(publish, "copy a run's rows to results/published, and draw its tables and figures from them")
    _run(made)
    _config(made)
    made.add_argument(
        "--any-code", action="store_true", help="results of code with uncommitted edits or outside git, too"
    )

    made = verbs.add(redraw, "make the tables and figures of a published run anew, in place, from its rows")
    _run(made)

    made = verbs.add(compare, "say how the tables of a computed run compare with the published ones")
    _run(made)
    _config(made)
    made.add_argument("--all", action="store_true", help="list every value that differs")


def _run(made: argparse.ArgumentParser) -> None:
    made.add_argument("--run", required=True, type=run_name, metavar="NAME", help="folder under results/ and figures/")
    made.add_argument("--results", type=path, default=Path("results"), metavar="DIR", help="default: results")
    made.add_argument("--figures", type=path, default=Path("figures"), metavar="DIR", help="default: figures")


def _config(made: argparse.ArgumentParser) -> None:
    made.add_argument("--config", type=path, metavar="FILE", help="of the run; default: config/NAME.yaml, if there")


def _computed(arguments: argparse.Namespace) -> "Contents | None":
    """What the computed run can hold; None where no config says so."""
    from ..report import parts
    from ..report.frames import own_models as own_rows

    results = arguments.results / arguments.run
    if arguments.run == parts.BENCH:
        return parts.bench_contents()
    if (results / own_rows.FILES[0]).is_file():
        return parts.own_contents(results)
    config = arguments.config or Path("config", f"{arguments.run}.yaml")
    if arguments.config is None and not config.is_file():
        return None
    return parts.config_contents(load_config(config, [f"run={arguments.run}"]))


def publish(arguments: argparse.Namespace) -> None:
    from ..report.publication import publish

    contents = _computed(arguments)
    if contents is None:
        raise UserError(f"there is no config/{arguments.run}.yaml: name the config of the run with --config")
    published, drawings = (root / PUBLISHED / arguments.run for root in (arguments.results, arguments.figures))
    done = publish(contents, arguments.results / arguments.run, published, drawings, any_code=arguments.any_code)
    print(f"published in {published} and {drawings}: {', '.join(done)}")


def redraw(arguments: argparse.Namespace) -> None:
    from ..report.publication import redraw

    published, drawings = (root / PUBLISHED / arguments.run for root in (arguments.results, arguments.figures))
    made = redraw(published, drawings)
    print(f"drawn in {published} and {drawings}: {', '.join(made)}")


def compare(arguments: argparse.Namespace) -> None:
    from ..report.parts import contents_of
    from ..report.replica import compared

    published = arguments.results / PUBLISHED / arguments.run
    there = contents_of(published)
    here = _computed(arguments) or there
    for line in compared(here, arguments.results / arguments.run, there, published, every=arguments.all):
        print(line)
