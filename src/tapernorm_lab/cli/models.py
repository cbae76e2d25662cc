"""Verbs that use a finished model: evaluate, fold, generate, bench."""

import argparse
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tapernorm.util.errors import UserError
from tapernorm.util.progress import announced

from ..config import cells
from ..config.gpt2 import ORIGINAL
from ..config.jobs import BenchJob, EvaluateJob
from ..config.linear_job import LinearJob, linear_job
from ..config.load import parse
from ..config.odd_inputs import RobustnessJob
from ..config.run import Config
from ..training.gpu_slots import device_slot
from .arguments import (
    DEVICE,
    OVERWRITE,
    Verbs,
    cell_of,
    config_options,
    from_json,
    job_of,
    named_folders,
    options,
    require_options,
    stands_for,
    writes,
)

_RUN = "run folder of `tapernorm pretrain` or `tapernorm finetune`"
_KINDS = "with a KV cache; the same with DyT and Derf beside it; or one forward of the prompt"


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    _add_evaluate(verbs)
    table = {
        "--model DIR!": _RUN,
        "--tokens DIR": "folder written by `tapernorm tokens`, to score on",
        "--out DIR!": "folder for unfused/, fused/ and result.json",
        "--forms unfused|fused+": "default: both",
    }
    summary = "fold a finished run's tapered norms into its linear maps, and score what is left"
    stands_for(verbs.add(fold, summary, table | OVERWRITE | DEVICE), hardware__device="--device")
    table = {
        "--checkpoint DIR!": "run folder of `tapernorm pretrain`, or a folder that `tapernorm fold` wrote",
        "--prompt TEXT!": "the text to continue",
        "--tokenizer DIR": "its tokenizer; default: that of its run",
        "--new-tokens N": "at most; default: what the context leaves",
        "--temperature X:0.8": "0: always the likeliest token",
        "--top-k K": "draw from the K likeliest tokens",
        "--top-p X": "draw from the likeliest tokens that hold X together",
        "--seed S:0": "",
        "--compile": "torch.compile the decoding step; CUDA graphs on a GPU",
        "--device auto|cpu|cuda:auto": "",
    }
    stands_for(verbs.add(generate, "continue a prompt, streaming the text", table), hardware__device="--device")
    table = {
        "name decode|rivals|last_token|linear": _KINDS,
        "--model DIR": "run folder of a tapered model; for linear, none",
        "--out FILE!": "JSON file for the raw samples",
        "--device auto|cpu|cuda:auto": "",
        "--jobs-per-gpu N:1": "that share one GPU, as hardware.jobs_per_gpu",
        "--threads CPUS": "for linear: CPU threads, as hardware.threads; default: 1",
    }
    made = verbs.add(bench, "time decoding with and without norms, or the kernels of linear maps", table)
    config_options(made)
    stands_for(made, hardware__device="--device")


def _add_evaluate(verbs: Verbs) -> None:
    made = verbs.add(evaluate, "score finished models: on tokens, on blocks with the tails of losses, or on odd inputs")
    whose = made.add_mutually_exclusive_group(required=True)
    options(
        whose,
        {
            "--model DIR": f"{_RUN}, or a folder that `tapernorm fold` wrote",
            "--models NAME=DIR+": "score on odd inputs: such a folder of each variant or arm; one is the baseline",
        },
    )
    table = {
        "--tokens DIR": "token stream that `tapernorm tokens` wrote",
        "--blocks NAME=DIR+": "blocks that `tapernorm tokens` wrote",
        "--split train|valid": "with --model and --tokens; default: valid",
        "--folded DIR": "with --blocks: its folded form, scored as well",
        "--tokenizer DIR": "with --blocks, --models: shows the worst rows as text",
        "--texts NAME=DIR*": "with --models: blocks of the config's robustness.texts, of context + 1 tokens",
        "--width D": "with --models, --config: d_model of the run's own",
        "--stage NAME": "with --models, --config: stage whose arms the models are",
        "--seed S": "with --models, --config: seed of the models",
        "--batch N:16": "rows per forward pass",
        "--out FILE": "write the scores there, as JSON",
    }
    options(made, table | DEVICE)
    config_options(made, required=False)
    stands_for(made, hardware__device="--device")


_SCORED_ON = {  # what a model is scored on -> the options that this needs, and those that it takes besides
    "models": (("tokens", "tokenizer", "out"), ("texts", "config", "job", "set", "width", "stage", "seed")),
    "tokens": ((), ("split",)),
    "blocks": (("tokenizer", "out"), ("folded", "job")),
}


def evaluate(arguments: argparse.Namespace) -> None:
    given = next((name for name in _SCORED_ON if getattr(arguments, name) is not None), None)
    if given is None:
        raise UserError("--model is scored on --tokens or on --blocks: give one of them")
    needs, may = _SCORED_ON[given]
    every = {name for on, (needed, taken) in _SCORED_ON.items() for name in (on, *needed, *taken)} - {"out"}
    require_options(arguments, f"a score on --{given}", needs=needs, may=(given, *may), of=sorted(every))
    if given == "models":
        _evaluate_odd_inputs(arguments)
        return
    written = nullcontext() if arguments.out is None else writes(arguments)
    with device_slot(arguments.device, arguments.jobs_per_gpu), written:
        report = _evaluate_stream(arguments) if given == "tokens" else _evaluate_blocks(arguments)
    print(json.dumps(report))


def _evaluate_odd_inputs(arguments: argparse.Namespace) -> None:
    if arguments.stage is None:
        width, chosen = cell_of(arguments, "width", "seed")
        job = job_of(arguments, RobustnessJob, lambda config: cells.robustness_job(config, width, chosen))
    else:
        require_options(arguments, "--stage, which has its own width,", of=("width",))
        stage, chosen = cell_of(arguments, "stage", "seed")
        job = job_of(arguments, RobustnessJob, lambda config: cells.stage_robustness_job(config, stage, chosen))
    models, texts = named_folders(arguments.models, "--models"), named_folders(arguments.texts or [], "--texts")
    with device_slot(arguments.device, arguments.jobs_per_gpu):
        from ..experiments.odd_inputs.scores import score_models

        with writes(arguments):
            inputs = (arguments.tokens, arguments.tokenizer, texts)
            result = score_models(job, models, *inputs, arguments.out, **_how(arguments))
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
    given = None if arguments.job is None else parse(EvaluateJob, from_json(arguments.job, "--job"), "--job")
    job = given or _described(arguments.model, list(blocks))
    forms = {"gated": arguments.model} | ({"fused": arguments.folded} if arguments.folded else {})
    from ..experiments.evaluate_corpora import evaluate_model

    result = evaluate_model(job, forms, blocks, arguments.tokenizer, arguments.out, **_how(arguments))
    return {
        name: {form: stats["rows"]["mean"] for form, stats in corpus["forms"].items()}
        for name, corpus in result["corpora"].items()
    }


def _how(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("device", "threads", "batch")}


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
            forms=arguments.forms or ("unfused", "fused"),
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
    if arguments.name == "linear":
        require_options(arguments, "bench linear", of=("model",))
        _bench_linear(arguments)
        return
    require_options(arguments, f"bench {arguments.name}", needs=("model",), of=("model", "threads"))
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
        with writes(arguments), announced(f"timing {arguments.name}"):
            write_json(arguments.out, run_benchmark(arguments.name, model, job, variant=variant, device=device))

    from ..report.frames.decoding import read
    from ..report.tables.table2_notes import bench_line

    for row in read(arguments.out, kind=f"bench_{arguments.name}").rows:
        print(bench_line(row))


def _bench_linear(arguments: argparse.Namespace) -> None:
    job = job_of(arguments, LinearJob, linear_job)

    from tapernorm.util.atomic_files import write_json

    from ..experiments.linear_kernels import choose_for_run

    with device_slot(arguments.device, arguments.jobs_per_gpu, whole=1), writes(arguments):
        result = choose_for_run(job, device=arguments.device, threads=arguments.threads or 1)
        write_json(arguments.out, result)
    speedup = result["values"]["onednn_speedup"]["value"]
    told = "not timed" if speedup is None else f"oneDNN is {speedup:.2f} times as fast as PyTorch's default"
    print(f"linear maps: {result['linear']} ({told})")
