"""Verbs that use a finished model: evaluate, fold, generate, bench."""

import argparse
import json
import math
from contextlib import nullcontext
from pathlib import Path

from tapernorm.util.errors import UserError

from ..config import cells
from ..config.gpt2 import ORIGINAL
from ..config.jobs import BenchJob, EvaluateJob
from ..config.load import parse
from ..config.odd_inputs import RobustnessJob
from ..config.run import Config
from ..training.gpu_slots import device_slot
from .arguments import (
    Verbs,
    cell_of,
    config_options,
    device,
    folders,
    from_json,
    job_of,
    named_folders,
    output,
    path,
    positive,
    seed,
    slots,
    threads,
    writes,
)

_RUN = "run folder of `tapernorm pretrain` or `tapernorm finetune`"


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    _add_evaluate(verbs)

    made = verbs.add(fold, "fold a finished run's tapered norms into its linear maps, and score what is left")
    folders(made, model=_RUN)
    made.add_argument("--tokens", type=path, metavar="DIR", help="folder written by `tapernorm tokens`, to score on")
    output(made, "folder for unfused/, fused/ and result.json")
    made.add_argument("--forms", nargs="+", choices=("unfused", "fused"), default=["unfused", "fused"])
    device(made)
    slots(made)
    threads(made)

    made = verbs.add(generate, "continue a prompt, streaming the text")
    folders(made, checkpoint="run folder of `tapernorm pretrain`, or a folder that `tapernorm fold` wrote")
    made.add_argument("--prompt", required=True, help="the text to continue")
    made.add_argument("--tokenizer", type=path, metavar="DIR", help="its tokenizer; default: that of its run")
    made.add_argument("--new-tokens", type=positive, metavar="N", help="at most; default: what the context leaves")
    made.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: always the likeliest token")
    made.add_argument("--top-k", type=positive, metavar="K", help="draw from the K likeliest tokens")
    made.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that hold P together")
    made.add_argument("--seed", type=seed, default=0, metavar="S")
    made.add_argument("--compile", action="store_true", help="torch.compile the decoding step; CUDA graphs on a GPU")
    device(made)

    made = verbs.add(bench, "time decoding with and without norms")
    config_options(made)
    kinds = "with a KV cache; the same with DyT and Derf beside it; or one forward of the prompt"
    made.add_argument("name", choices=("decode", "rivals", "last_token"), help=kinds)
    folders(made, model="run folder of a tapered model")
    made.add_argument("--out", type=path, required=True, metavar="FILE", help="JSON file for the raw samples")
    device(made)
    slots(made)


def _add_evaluate(verbs: Verbs) -> None:
    made = verbs.add(evaluate, "score finished models: on tokens, on blocks with the tails of losses, or on odd inputs")
    whose = made.add_mutually_exclusive_group(required=True)
    whose.add_argument("--model", type=path, metavar="DIR", help=f"{_RUN}, or a folder that `tapernorm fold` wrote")
    whose.add_argument(
        "--models",
        nargs="+",
        metavar="NAME=DIR",
        help="score these on odd inputs: such a folder of each variant or arm; one is the baseline",
    )
    made.add_argument("--tokens", type=path, metavar="DIR", help="token stream that `tapernorm tokens` wrote")
    made.add_argument("--blocks", nargs="+", metavar="NAME=DIR", help="blocks that `tapernorm tokens` wrote")
    made.add_argument("--split", choices=("train", "valid"), help="with --model and --tokens; default: valid")
    made.add_argument("--folded", type=path, metavar="DIR", help="with --blocks: its folded form, scored as well")
    made.add_argument(
        "--tokenizer", type=path, metavar="DIR", help="with --blocks, --models: shows the worst rows as text"
    )
    made.add_argument(
        "--texts",
        nargs="*",
        metavar="NAME=DIR",
        help="with --models: blocks of one token more than the context, of the config's robustness.texts",
    )
    config_options(made, required=False)
    made.add_argument("--width", type=positive, metavar="D", help="with --models, --config: d_model of the run's own")
    made.add_argument("--stage", metavar="NAME", help="with --models, --config: stage whose arms the models are")
    made.add_argument("--seed", type=seed, metavar="S", help="with --models, --config: seed of the models")
    made.add_argument("--batch", type=positive, default=16, metavar="N", help="rows per forward pass")
    device(made)
    slots(made)
    threads(made)
    made.add_argument("--out", type=path, metavar="FILE", help="write the scores there, as JSON")


def evaluate(arguments: argparse.Namespace) -> None:
    _require_options_of_evaluate(arguments)
    if arguments.models is not None:
        _evaluate_odd_inputs(arguments)
        return
    written = nullcontext() if arguments.out is None else writes(arguments.out, "evaluate")
    with device_slot(arguments.device, arguments.jobs_per_gpu), written:
        report = _evaluate_stream(arguments) if arguments.tokens else _evaluate_blocks(arguments)
    print(json.dumps(report))


def _require_options_of_evaluate(arguments: argparse.Namespace) -> None:
    """Raise UserError unless the options belong together."""
    if arguments.models is None and (arguments.tokens is None) == (arguments.blocks is None):
        raise UserError("--model is scored on --tokens or on --blocks: give one of them")
    belong = {  # what is given -> the options that only it takes
        "--tokens": ("tokens", "split"),
        "--blocks": ("blocks", "folded", "tokenizer", "job"),
        "--models": ("tokens", "tokenizer", "texts", "config", "job", "set", "width", "stage", "seed"),
    }
    given = "--models" if arguments.models else "--tokens" if arguments.tokens else "--blocks"
    for other, names in belong.items():
        wrong = [
            f"--{name}" for name in names if name not in belong[given] and getattr(arguments, name) not in (None, [])
        ]
        if wrong:
            raise UserError(f"{', '.join(wrong)}: only with {other}")
    if arguments.models is not None:
        for name in ("tokens", "tokenizer", "out"):
            if getattr(arguments, name) is None:
                raise UserError(f"--models needs --{name}: name it")


def _evaluate_odd_inputs(arguments: argparse.Namespace) -> None:
    if arguments.stage is None:
        width, chosen = cell_of(arguments, "width", "seed")
        job = job_of(arguments, RobustnessJob, lambda config: cells.robustness_job(config, width, chosen))
    else:
        if arguments.width is not None:
            raise UserError("--width is that of the run's own models, and --stage has its own: leave one out")
        stage, chosen = cell_of(arguments, "stage", "seed")
        job = job_of(arguments, RobustnessJob, lambda config: cells.stage_robustness_job(config, stage, chosen))
    models, texts = named_folders(arguments.models, "--models"), named_folders(arguments.texts or [], "--texts")
    with device_slot(arguments.device, arguments.jobs_per_gpu):
        from ..experiments.odd_inputs.scores import score_models

        with writes(arguments.out, "evaluate"):
            result = score_models(
                job,
                models,
                arguments.tokens,
                arguments.tokenizer,
                texts,
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


def _evaluate_stream(arguments: argparse.Namespace) -> dict[str, float | int | None]:
    from tapernorm.architectures import context_of, vocabulary_of
    from tapernorm.checkpoints.store import load
    from tapernorm.util.atomic_files import write_json

    from ..data.token_stream import TokenStream
    from ..training.device import take_device
    from ..training.run_folder import require_vocabulary
    from ..training.validation_loss import evaluate

    device = take_device(arguments.device, arguments.threads)
    stream = TokenStream.open(arguments.tokens, arguments.split or "valid")
    model = load(arguments.model).to(device)
    require_vocabulary(vocabulary_of(model), stream.manifest, arguments.tokens)
    score = evaluate(
        model,
        stream.tokens,
        text_bytes=stream.split["bytes"],
        context=context_of(model),
        batch=arguments.batch,
        device=device,
    )
    report = {"ce_nats_per_token": score.ce, "bits_per_byte": score.bits_per_byte, "tokens": score.tokens}
    if arguments.out:
        write_json(arguments.out, report)
    return report


def _evaluate_blocks(arguments: argparse.Namespace) -> dict[str, dict[str, float | None]]:
    blocks = named_folders(arguments.blocks, "--blocks")
    if arguments.tokenizer is None or arguments.out is None:
        raise UserError("--blocks needs --tokenizer, to show the worst rows, and --out, for the scores")
    job = _described(arguments.model, list(blocks)) if arguments.job is None else _given(arguments.job)
    forms = {"gated": arguments.model} | ({"fused": arguments.folded} if arguments.folded else {})
    from ..experiments.evaluate_corpora import evaluate_model

    result = evaluate_model(
        job,
        forms,
        blocks,
        arguments.tokenizer,
        arguments.out,
        device=arguments.device,
        threads=arguments.threads,
        batch=arguments.batch,
    )
    return {
        name: {form: stats["rows"]["mean"] for form, stats in corpus["forms"].items()}
        for name, corpus in result["corpora"].items()
    }


def _given(job: str) -> EvaluateJob:
    return parse(EvaluateJob, from_json(job, "--job"), "--job")


def _described(folder: Path, corpora: list[str]) -> EvaluateJob:
    """The job that scores a run folder by hand: what the run says of itself, corpora under their own names."""
    from tapernorm.util.atomic_files import read_json

    path = folder / "result.json"
    result = read_json(path) if path.is_file() else {}
    job = result.get("job")
    known = job if isinstance(job, dict) else {}  # a model that was only brought here has none
    model = {"kind": "finetuned", "size": known.get("size", "unknown"), "method": known.get("method", "unknown")}
    model |= {"seed": known.get("seed"), "base": "unknown"}
    if result.get("kind") == "base":
        model |= {"kind": "original", "method": ORIGINAL, "seed": None}
    names = {name: name for name in corpora}
    return parse(EvaluateJob, {"model": model, "labels": names, "columns": names}, str(folder))


def fold(arguments: argparse.Namespace) -> None:
    with device_slot(arguments.device, arguments.jobs_per_gpu):
        from ..experiments.fold_run import fold_run

        result = fold_run(
            arguments.model,
            arguments.tokens,
            arguments.out,
            forms=arguments.forms,
            device=arguments.device,
            threads=arguments.threads,
            overwrite=arguments.overwrite,
        )
    values = result["values"]
    for form, report in result["reports"].items():
        line = (
            f"{form}: {len(report['norms'])} norms, largest logit difference {report['largest_logit_difference']:.2g}"
            f" of {report['largest_logit']:.2g}"
        )
        if values:
            moved = values[f"valid_ce_{form}"]["value"] - values["valid_ce_gated"]["value"]
            line += f", validation loss moved by {moved:+.2g} nats/token"
        print(line)
        for warning in report["warnings"]:
            print(f"{form}: {warning}")


def generate(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.temperature < math.inf:
        raise UserError(f"--temperature must be at least 0 and finite, got {arguments.temperature:g}")
    if arguments.top_p is not None and not 0 < arguments.top_p <= 1:
        raise UserError(f"--top-p must lie in (0, 1], got {arguments.top_p:g}")
    from ..experiments.generate import stream_text

    text = stream_text(
        arguments.checkpoint,
        arguments.prompt,
        tokenizer=arguments.tokenizer,
        new_tokens=arguments.new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        device=arguments.device,
        compile=arguments.compile,
    )
    for piece in text:
        print(piece, end="", flush=True)
    print()


def bench(arguments: argparse.Namespace) -> None:
    job = job_of(arguments, BenchJob, Config.bench_job)

    from tapernorm.checkpoints.store import load
    from tapernorm.models.decoder import Decoder
    from tapernorm.util.atomic_files import read_json, write_json

    from ..experiments.speed.decode_speed import run_benchmark
    from ..training.device import pick_device

    model = load(arguments.model, Decoder)
    result = arguments.model / "result.json"
    if not result.is_file():
        raise UserError(f"{arguments.model} holds no result.json: give the run folder of a tapered model")
    trained = read_json(result)["job"]
    variant = trained.get("pretrain", trained)["variant"]  # of an arm of a study, that of its pre-training
    with device_slot(arguments.device, arguments.jobs_per_gpu, whole=1):  # nobody beside it
        device = pick_device(arguments.device)
        with writes(arguments.out, "bench"):
            write_json(arguments.out, run_benchmark(arguments.name, model, job, variant=variant, device=device))

    from ..report.frames.decoding import read
    from ..report.tables.table2_notes import bench_line

    for row in read(arguments.out, kind=f"bench_{arguments.name}").rows:
        print(bench_line(row))
