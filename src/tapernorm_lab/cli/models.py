"""The verbs that use a trained model: evaluate, fold, generate, bench."""

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
from ..config.load import parse
from ..config.odd_inputs import RobustnessJob
from ..config.run import Config
from ..config.run_cost import LinearJob, linear_job
from ..training.gpu_slots import device_slot
from .arguments import (
    DEVICE,
    ON_DEVICE,
    OVERWRITE,
    PER_GPU,
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
_FORMS = "unfused: replace each norm by a fixed scale; fused: fold each norm into the linear maps"
_KINDS = (
    "decode: with a KV cache; rivals: as decode, with DyT and Derf too; last_token: one forward pass of the prompt;"
    " linear: the kernels of a run's linear maps, of which it chooses one"
)


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    _add_evaluate(verbs)
    table = {
        "--model DIR!": _RUN,
        "--tokens DIR": "token stream that `tapernorm tokens` wrote, to score on; default: no score",
        "--out DIR!": "folder to write unfused/, fused/ and result.json into",
        "--forms unfused|fused+": f"{_FORMS}; default: both",
    }
    summary = "fold the tapered norms of a finished run into its linear maps, and score the result"
    stands_for(verbs.add(fold, summary, table | OVERWRITE | DEVICE), hardware__device="--device")
    table = {
        "--checkpoint DIR!": "run folder of `tapernorm pretrain`, or a folder that `tapernorm fold` wrote",
        "--prompt TEXT!": "the text to continue",
        "--tokenizer DIR": "folder of the tokenizer; default: the one that the run was trained with",
        "--new-tokens N": "most tokens to generate; default: as many as the context has room for",
        "--temperature X:0.8": "divides the logits; 0: always take the most probable token",
        "--top-k K": "sample from the K most probable tokens",
        "--top-p X": "sample from the smallest set of tokens whose probability is at least X",
        "--seed S:0": "seed of the sampling",
        "--compile": "compile the decoding step with torch.compile, with CUDA graphs on a GPU",
        "--weights stored|int8:stored": "of the linear maps; int8 needs a CPU and rounds activations to bfloat16",
        "--device auto|cpu|cuda:auto": ON_DEVICE,
    }
    stands_for(
        verbs.add(generate, "continue a prompt, and print the text as it is generated", table),
        hardware__device="--device",
    )
    table = {
        "name decode|rivals|last_token|linear": _KINDS,
        "--model DIR": "run folder of a tapered model; linear takes none",
        "--out FILE!": "JSON file to write the raw samples into",
        "--device auto|cpu|cuda:auto": ON_DEVICE,
        "--jobs-per-gpu N:1": PER_GPU,
        "--threads CPUS": "for linear: number of CPU threads, as hardware.threads; default: 1",
    }
    made = verbs.add(bench, "measure the speed of decoding with and without norms, or of linear maps", table)
    config_options(made)
    stands_for(made, hardware__device="--device")


def _add_evaluate(verbs: Verbs) -> None:
    made = verbs.add(
        evaluate, "score trained models: on a token stream, on blocks with the tails of the losses, or on odd inputs"
    )
    whose = made.add_mutually_exclusive_group(required=True)
    options(
        whose,
        {
            "--model DIR": f"{_RUN}, or a folder that `tapernorm fold` wrote",
            "--models NAME=DIR+": "score on odd inputs: a folder as in --model for every variant or arm, baseline too",
        },
    )
    table = {
        "--tokens DIR": "token stream that `tapernorm tokens` wrote, to score on",
        "--blocks NAME=DIR+": "blocks that `tapernorm tokens` wrote, to score on, each with a name for the corpus",
        "--split train|valid": "with --model and --tokens: split to score on; default: valid",
        "--folded DIR": "with --blocks: the folded form of --model, scored too",
        "--tokenizer DIR": "with --blocks, --models: folder of the tokenizer, to show the worst rows as text",
        "--texts NAME=DIR*": "with --models: blocks of context + 1 tokens for each text of robustness.texts",
        "--width D": "with --models, --config: d_model of the models, if they are variants of the run",
        "--stage NAME": "with --models, --config: stage of the study, if the models are its arms",
        "--seed S": "with --models, --config: seed of the models",
        "--batch N:16": "rows per forward pass",
        "--out FILE": "JSON file to write the scores into",
    }
    options(made, table | DEVICE)
    config_options(made, required=False)
    stands_for(made, hardware__device="--device")


_SCORED_ON = {  # option that chooses what to score on -> options that it needs, options that it may take
    "models": (("tokens", "tokenizer", "out"), ("texts", "config", "job", "set", "width", "stage", "seed")),
    "tokens": ((), ("split",)),
    "blocks": (("tokenizer", "out"), ("folded", "job")),
}


def evaluate(arguments: argparse.Namespace) -> None:
    given = next((name for name in _SCORED_ON if getattr(arguments, name) is not None), None)
    if given is None:
        raise UserError("--model needs --tokens or --blocks, to score on: add one of them")
    needs, may = _SCORED_ON[given]
    every = {name for on, (needed, taken) in _SCORED_ON.items() for name in (on, *needed, *taken)} - {"out"}
    require_options(arguments, f"evaluate --{given}", needs=needs, may=(given, *may), of=sorted(every))
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
    """The job for a run folder without --job: settings from result.json, each corpus under its name."""
    from tapernorm.util.atomic_files import read_json

    path = folder / "result.json"
    result = read_json(path) if path.is_file() else {}
    job = result.get("job")
    known = job if isinstance(job, dict) else {}  # a copied model has no job
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
        raise UserError(f"--temperature {arguments.temperature:g} is out of range: give a finite number, 0 or more")
    if arguments.top_p is not None and not 0 < arguments.top_p <= 1:
        raise UserError(f"--top-p {arguments.top_p:g} is out of range: give a number above 0, at most 1")
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
        weights=arguments.weights,
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
        raise UserError(f"--model {arguments.model} holds no result.json: give the run folder of a tapered model")
    trained = read_json(result)["job"]
    variant = trained.get("pretrain", trained)[
        "variant"
    ]  # an arm keeps the settings of its pre-training one level below
    with device_slot(arguments.device, arguments.jobs_per_gpu, whole=1):  # no other job beside a measurement
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
