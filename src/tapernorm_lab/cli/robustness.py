"""Verbs of Table S3: robustness, trials."""

import argparse

from tapernorm.util.errors import UserError

from ..config import cells
from ..config.odd_inputs import RobustnessJob, TrialsJob
from ..training.gpu_slots import device_slot
from .arguments import (
    Verbs,
    cell_of,
    device,
    figure_files,
    folders,
    job_of,
    named_folders,
    path,
    positive,
    seed,
    slots,
    table_files,
    threads,
    writes,
)


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(robustness, "score finished models on odd inputs beside their Baseline", configured=True)
    whose = made.add_mutually_exclusive_group()
    whose.add_argument("--width", type=positive, metavar="D", help="with --config: d_model of the run's own models")
    whose.add_argument("--stage", metavar="NAME", help="with --config: stage of the study whose arms the models are")
    made.add_argument("--seed", type=seed, metavar="S", help="with --config: seed of the models")
    made.add_argument(
        "--models",
        nargs="+",
        required=True,
        metavar="NAME=DIR",
        help="run folder of each variant or arm, or its folder that `tapernorm fold` wrote; one is the baseline",
    )
    folders(made, tokens="folder written by `tapernorm tokens`: what they were trained on")
    folders(made, tokenizer="folder written by `tapernorm tokenizer`")
    made.add_argument(
        "--texts",
        nargs="*",
        default=[],
        metavar="NAME=DIR",
        help="folders written by `tapernorm blocks`, rows of one token more than the context: robustness.texts",
    )
    made.add_argument("--batch", type=positive, default=16, metavar="N", help="rows per forward pass")
    device(made)
    slots(made)
    threads(made)
    made.add_argument("--out", type=path, required=True, metavar="FILE", help="JSON file for the scores")

    made = verbs.add(trials, "gather scores on odd inputs into rows, or make tables or figure of them", configured=True)
    made.add_argument("what", choices=("rows", "table", "figure"))
    made.add_argument("scores", nargs="*", type=path, metavar="FILE", help="rows: written by `tapernorm robustness`")
    made.add_argument("--stage", metavar="NAME", help="with --config: the scores are of arms of this stage")
    made.add_argument("--rows", type=path, metavar="DIR", help="table, figure: written by `tapernorm trials rows`")
    folders(made, out="folder for the rows, tables or figure")


def robustness(arguments: argparse.Namespace) -> None:
    if arguments.stage is None:
        width, chosen = cell_of(arguments, "width", "seed")
        job = job_of(arguments, RobustnessJob, lambda config: cells.robustness_job(config, width, chosen))
    else:
        stage, chosen = cell_of(arguments, "stage", "seed")
        job = job_of(arguments, RobustnessJob, lambda config: cells.stage_robustness_job(config, stage, chosen))
    with device_slot(arguments.device, arguments.jobs_per_gpu):
        from ..experiments.odd_inputs.odd_inputs import score_models

        with writes(arguments.out, "robustness"):
            result = score_models(
                job,
                named_folders(arguments.models, "--models"),
                arguments.tokens,
                arguments.tokenizer,
                named_folders(arguments.texts, "--texts"),
                arguments.out,
                device=arguments.device,
                threads=arguments.threads,
                batch=arguments.batch,
            )
    for row in result["scores"]:
        mean, most = ("not finite" if (x := row["rows"][name]) is None else f"{x:.4f}" for name in ("mean", "max"))
        beside = row["beside_baseline"]
        told = "" if beside is None else f", {beside['blown']} rows blown up"
        print(f"{row['model']}, {row['trial']}, {row['part']}: mean {mean}, worst row {most}{told}")


def trials(arguments: argparse.Namespace) -> None:
    if arguments.stage is not None:
        cell_of(arguments, "stage")  # a --job names its own
    job = job_of(arguments, TrialsJob, lambda config: config.trials_job(arguments.stage))
    needed, other = ("scores", "rows") if arguments.what == "rows" else ("rows", "scores")
    if not getattr(arguments, needed) or getattr(arguments, other):
        names = {"scores": "files of `tapernorm robustness`", "rows": "--rows"}
        raise UserError(f"trials {arguments.what} is made from {names[needed]}, and not from {names[other]}")
    from ..report.frames import odd_inputs as robustness_rows

    if arguments.what == "rows":
        rows = robustness_rows.collect(arguments.scores, run=job.run)
        robustness_rows.require(rows, job)
        names = [file.name for file in robustness_rows.files(arguments.out, job.name).values()]
        with writes(arguments.out, "trials", *names):
            robustness_rows.write(rows, arguments.out, name=job.name)
        return
    rows = robustness_rows.read(arguments.rows, run=job.run, name=job.name)
    robustness_rows.require(rows, job)
    if arguments.what == "table":
        from ..report import html, table
        from ..report.tables import odd_inputs as robustness_table

        for made in robustness_table.tables(rows, job):
            with writes(arguments.out, "trials", *table_files(made.name)):
                table.write(made, arguments.out)
                html.write(made, arguments.out)
    else:
        from ..report.figures import figure1_2_curves as figures
        from ..report.figures import odd_inputs as robustness_figure

        if job.stage is not None:
            raise UserError("the figure is of the run's own models: leave --stage out")
        drawing, frame = robustness_figure.figure_s3(rows, run=job.run, caption=job.caption)
        with writes(arguments.out, "trials", *figure_files("figure_S3")):
            figures.save(drawing, frame, arguments.out / "figure_S3")
