"""Verbs that show what tapers of one's own came to: spread, outcome."""

import argparse
from pathlib import Path

from ..training.outputs import output_files
from .arguments import (
    Verbs,
    device,
    folders,
    named_folders,
    positive,
    run_name,
    threads,
)

_TOKENS = 8192


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(spread, "measure the per-token scale at every norm of a finished taper, before and after")
    folders(made, model="run folder of `tapernorm taper`, where spread.json is written")
    made.add_argument("--tokens", type=positive, default=_TOKENS, metavar="N", help=f"held-out; default {_TOKENS}")
    device(made)
    threads(made)

    made = verbs.add(outcome, "write tables of scores and norms, and figures of the scales, of finished tapers")
    made.add_argument("--runs", nargs="+", required=True, metavar="NAME=DIR", help="measured by `tapernorm spread`")
    made.add_argument("--run", type=run_name, required=True, metavar="NAME", help="what they are called together")
    made.add_argument("--caption", default="", metavar="TEXT", help="a sentence for each table and figure")
    folders(made, results="folder for rows/, and from these tables/: scores and norms_NAME, as .csv, .md and .tex")
    folders(made, figures="folder for figure_spread_NAME, as .pdf, .png and .csv")


def spread(arguments: argparse.Namespace) -> None:
    from ..own_model.scales_before_after import result_of, spread_run
    from ..training.gpu_slots import device_slot
    from ..training.run_lock import run_lock
    from .own_model import quiet

    quiet()
    result_of(arguments.model)  # refused before the lock makes a folder
    out = arguments.model / "spread.json"
    with device_slot(arguments.device, 1), run_lock(arguments.model):
        spread_run(arguments.model, out, tokens=arguments.tokens, device=arguments.device, threads=arguments.threads)
    print(f"measured in {out}")


def outcome(arguments: argparse.Namespace) -> None:
    from ..report import catalogue
    from ..report.frames import own_models as own_rows

    runs: dict[str, Path] = named_folders(arguments.runs, "--runs")
    results = arguments.results
    gathered = own_rows.collect(runs, run=arguments.run, caption=arguments.caption)
    entries = catalogue.own_entries(runs)
    places = {"results": results, "figures": arguments.figures}
    made = [places[folder] / name for entry in entries for folder, name in catalogue.files_of(entry)]
    with output_files([*(results / name for name in own_rows.FILES), *made], "outcome"):
        own_rows.write(gathered, results / own_rows.FOLDER)
        found = catalogue.Rows(results, arguments.run)
        for entry in entries:
            catalogue.write(entry, found, results, arguments.figures)
