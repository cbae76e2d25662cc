"""The verbs about whole runs: plan, compare."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tapernorm.util.errors import UserError

from ..config.load import load_config
from ..training.outputs import output_files
from .arguments import Verbs, options, require_options, set_option

if TYPE_CHECKING:
    from ..report.parts import Contents

PUBLISHED = "published"  # folder inside that of the results and inside that of the figures


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(plan, "estimate the cost of a whole run: jobs, tokens, FLOPs, disk and hours")
    set_option(made)
    options(
        made,
        {
            "--config FILE!": "config file of a run, such as config/paper.yaml",
            "--flops-per-s F": "speed of one job in FLOP/s, to estimate the hours",
            "--rows DIR": "folder that `tapernorm rows training` wrote: estimate the hours from the speeds of its runs",
        },
    )
    made = verbs.add(
        compare, "compare the tables of a computed run with the published ones, publish the run, or pack it"
    )
    options(
        made,
        {
            "--run RUN!": "name of the run: a folder inside --results and --figures",
            "--results DIR:results": "folder of the results of all runs",
            "--figures DIR": "with --publish or --crate: folder of the figures of all runs; default: figures",
            "--config FILE": "config file of the run; default: config/RUN.yaml, if it exists",
            "--all": "print every value that differs, not only the largest differences",
            "--publish": "copy the rows of the run to results/published, and remake tables and figures from them",
            "--crate FILE": "pack the published run, with its workflow and provenance, into this ZIP, an RO-Crate",
            "--any-code": "with --publish: accept results of code with uncommitted edits or outside git",
        },
    )


def plan(arguments: argparse.Namespace) -> None:
    from ..config.run_cost import Speed, cost_text, measured_tokens_per_s

    config = load_config(arguments.config, arguments.set)
    measured = measured_tokens_per_s(arguments.rows / "results.csv") if arguments.rows else {}
    print(cost_text(config, Speed(arguments.flops_per_s, measured)))


def compare(arguments: argparse.Namespace) -> None:
    if arguments.publish:
        require_options(arguments, "--publish, which compares nothing,", of=("all", "crate"))
    elif arguments.crate is not None:
        require_options(arguments, "--crate, which compares nothing,", of=("all", "any_code", "config"))
    else:
        require_options(arguments, "compare without --publish", of=("any_code", "figures"))
    computed, published = arguments.results / arguments.run, arguments.results / PUBLISHED / arguments.run
    drawings = (arguments.figures or Path("figures")) / PUBLISHED / arguments.run
    if arguments.publish:
        from ..report.publication import publish

        contents = _computed(arguments)
        if contents is None:
            raise UserError(f"config/{arguments.run}.yaml does not exist: give the config of the run with --config")
        done = publish(contents, computed, published, drawings, any_code=arguments.any_code)
        print(f"published: {', '.join(done)}")
        arguments.written.extend([published, drawings])
        return
    from ..report.parts import contents_of

    there = contents_of(published)
    if arguments.crate is not None:
        from ..report.crate import write_crate

        with output_files([arguments.crate], "compare"):
            write_crate(there, published, drawings, arguments.crate, checkout=Path())
        arguments.written.append(arguments.crate)
        return
    from ..report.replica import compared

    here = _computed(arguments) or there
    for line in compared(here, computed, there, published, every=arguments.all):
        print(line)


def drawn_anew(run: str, results: Path, figures: Path) -> list[Path]:
    """Remake the tables and figures of a published run from its rows, in place; return the folders that hold them."""
    from ..report.publication import redraw

    published, drawings = (root / PUBLISHED / run for root in (results, figures))
    made = redraw(published, drawings)
    print(f"drawn: {', '.join(made)}")
    return [published, drawings]


def _computed(arguments: argparse.Namespace) -> "Contents | None":
    """Return what the computed run can contain, or None if no config describes it."""
    from ..report import parts
    from ..report.catalogue import OWN_FILES

    results = arguments.results / arguments.run
    if arguments.run == parts.BENCH:
        require_options(arguments, "the run of `make bench`", of=("config",))
        return parts.bench_contents()
    if (results / OWN_FILES[0]).is_file():
        require_options(arguments, "a run of `tapernorm taper`", of=("config",))
        return parts.own_contents(results)
    config = arguments.config or Path("config", f"{arguments.run}.yaml")
    if arguments.config is None and not config.is_file():
        return None
    return parts.config_contents(load_config(config, [f"run={arguments.run}"]))
