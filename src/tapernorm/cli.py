"""`tapernorm VERB`: each verb parses its arguments, loads, calls one function of the library, and writes.

Heavy imports stay inside the verbs: `tapernorm --help` must be instant.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from . import __version__
from .config import (
    VARIANTS,
    BenchJob,
    Config,
    CorpusJob,
    HardwareConfig,
    PretrainJob,
    ReportJob,
    Strict,
    TokenizerJob,
    TokensJob,
)
from .configfile import json_schema, load_config, parse
from .errors import UserError
from .files import REASONS
from .runlock import run_lock

Job = TypeVar("Job", bound=Strict)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; 0 on success, 2 with a one-line message for what the user can mend, 130 on Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.verb(arguments)
    except UserError as error:
        print(f"tapernorm: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in REASONS:
            raise
        print(f"tapernorm: {error} ({REASONS[error.errno]})", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(__package__ or ""):
            raise
        print(f"tapernorm: this needs {error.name}: pip install 'tapernorm[workflow]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tapernorm: interrupted; the same command goes on, training from its last checkpoint", file=sys.stderr)
        return 130
    return 0


def corpus(arguments: argparse.Namespace) -> None:
    from .data.corpora import build_corpus

    job = _job(arguments, CorpusJob, Config.corpus_job)
    with run_lock(arguments.out):
        build_corpus(job, arguments.out)


def tokenizer(arguments: argparse.Namespace) -> None:
    from .data.tokenizer import train_tokenizer

    job = _job(arguments, TokenizerJob, Config.tokenizer_job)
    with run_lock(arguments.out):
        train_tokenizer(job, arguments.corpus, arguments.out)


def tokens(arguments: argparse.Namespace) -> None:
    from .data.tokens import write_tokens

    job = _job(arguments, TokensJob, Config.tokens_job)
    with run_lock(arguments.out):
        write_tokens(arguments.corpus, arguments.tokenizer, arguments.out, job.context)


def pretrain(arguments: argparse.Namespace) -> None:
    def job_of(config: Config) -> PretrainJob:
        missing = [f"--{name}" for name in ("variant", "width", "seed") if getattr(arguments, name) is None]
        if missing:
            raise UserError(f"pretrain --config needs {', '.join(missing)}: which job of the run is meant")
        return config.pretrain_job(arguments.variant, arguments.width, arguments.seed)

    cell = (arguments.variant, arguments.width, arguments.seed)
    if arguments.job is not None and cell != (None, None, None):
        raise UserError("--variant, --width and --seed choose a job of a --config file; a --job names its own")
    job = _job(arguments, PretrainJob, job_of)
    hardware = _hardware(arguments)

    from .pretrain import pretrain

    result = pretrain(job, arguments.tokens, arguments.out, hardware)
    score = result["values"]
    print(f"valid_ce {score['valid_ce']['value']:.4f} nats/token, {score['bits_per_byte']['value']:.4f} bits/byte")


def evaluate(arguments: argparse.Namespace) -> None:
    from .data.tokens import TokenStream
    from .evaluate import evaluate
    from .files import write_json
    from .models.store import load
    from .pretrain import require_vocabulary
    from .train import pick_device

    device = pick_device(arguments.device)
    model = load(arguments.model).to(device)
    stream = TokenStream.open(arguments.tokens, arguments.split)
    require_vocabulary(model.config.vocab_size, stream, arguments.tokens)
    score = evaluate(
        model,
        stream.tokens,
        text_bytes=stream.split["bytes"],
        context=model.config.context,
        batch=arguments.batch,
        device=device,
    )
    report = {"ce_nats_per_token": score.ce, "bits_per_byte": score.bits_per_byte, "tokens": score.tokens}
    if arguments.out:
        write_json(arguments.out, report)
    print(json.dumps(report))


def fold(arguments: argparse.Namespace) -> None:
    from .folded import fold_run

    result = fold_run(
        arguments.model, arguments.tokens, arguments.out, device=arguments.device, threads=arguments.threads
    )
    for form, report in result["reports"].items():
        moved = result["values"][f"valid_ce_{form}"]["value"] - result["values"]["valid_ce_gated"]["value"]
        print(
            f"{form}: {len(report['norms'])} norms, largest logit difference {report['largest_logit_difference']:.2g}, "
            f"validation loss moved by {moved:+.2g} nats/token"
        )


def generate(arguments: argparse.Namespace) -> None:
    from .generation import stream_text

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
    job = _job(arguments, BenchJob, Config.bench_job)

    from .decode_bench import run_benchmark
    from .files import read_json, write_json
    from .models.store import load
    from .train import pick_device

    model = load(arguments.model)
    result = arguments.model / "result.json"
    if not result.is_file():
        raise UserError(f"{arguments.model} holds no result.json: give the run folder of a tapered model")
    variant = read_json(result)["job"]["variant"]
    device = pick_device(arguments.device)
    write_json(arguments.out, run_benchmark(arguments.name, model, job, variant=variant, device=device))

    from .report.decode_notes import bench_line
    from .report.decode_rows import read

    for row in read(arguments.out, kind=f"bench_{arguments.name}").rows:
        print(bench_line(row))


def rows(arguments: argparse.Namespace) -> None:
    from .report import rows

    rows.write(*rows.collect(arguments.results, run=arguments.run), arguments.out)


def table(arguments: argparse.Namespace) -> None:
    from .report import decode_rows, decode_tables, rows, table, tables

    job = _job(arguments, ReportJob, Config.report_job)
    if arguments.name == "table1":
        results, _ = rows.read(_source(arguments, "rows"))
        _require_run(job, results["run"])
        made = tables.table1(results, run=job.run, caption=job.caption, labels=job.labels)
    else:
        kind = decode_rows.LAST_TOKEN if arguments.name == "table2v1" else decode_rows.DECODE
        measured = decode_rows.read(_source(arguments, "bench"), kind=kind)
        make = {"table2": decode_tables.table2, "table2x": decode_tables.table2x, "table2v1": decode_tables.table2v1}
        made = make[arguments.name](measured, run=job.run, caption=job.caption)
    table.write(made, arguments.out)


def figure(arguments: argparse.Namespace) -> None:
    from .report import decode_figure, decode_rows, figures, rows

    job = _job(arguments, ReportJob, Config.report_job)
    if arguments.name == "figure_decode":
        measured = decode_rows.read(_source(arguments, "bench"))
        drawing, frame = decode_figure.figure_decode(measured, run=job.run, caption=job.caption)
    else:
        results, curves = rows.read(_source(arguments, "rows"))
        _require_run(job, results["run"])
        make = {"figure1a": figures.figure1a, "figure1b": figures.figure1b, "figure2": figures.figure2}
        drawing, frame = make[arguments.name](curves, run=job.run, caption=job.caption, labels=job.labels)
    figures.save(drawing, frame, arguments.out / arguments.name)


def _require_run(job: ReportJob, runs: Iterable[str]) -> None:
    """Rows of one run are never printed under the name of another."""
    if others := set(runs) - {job.run}:
        raise UserError(f"the rows are of run {', '.join(sorted(others))} and the config is of run {job.run!r}")


def _source(arguments: argparse.Namespace, option: str) -> Path:
    """Where a table or figure gets its numbers: --rows for training, --bench for decoding."""
    given = getattr(arguments, option)
    if given is None:
        raise UserError(f"{arguments.name} is made from --{option}: name it")
    return given


def schema(arguments: argparse.Namespace) -> None:
    from .files import write_text

    write_text(arguments.out, json_schema())


def _job(arguments: argparse.Namespace, kind: type[Job], cut: Callable[[Config], Job]) -> Job:
    """The job given as JSON, or cut from the config file."""
    if arguments.job is not None:
        if arguments.set:
            raise UserError("--set changes a --config file; it does nothing to a --job")
        return parse(kind, _json(arguments.job, "--job"), "--job")
    return cut(load_config(arguments.config, arguments.set))


def _hardware(arguments: argparse.Namespace) -> HardwareConfig:
    if arguments.hardware is not None:
        hardware = parse(HardwareConfig, _json(arguments.hardware, "--hardware"), "--hardware")
    elif arguments.config is not None:
        hardware = load_config(arguments.config, arguments.set).hardware
    else:
        raise UserError("pretrain --job needs --hardware: the hardware section of a config, as JSON")
    return hardware if arguments.threads is None else hardware.model_copy(update={"threads": arguments.threads})


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _json(text: str, option: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{option} is not JSON ({error}): quote it as one argument") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tapernorm",
        description="Gated removal of normalization from pre-norm Transformers (arXiv 2602.10408). "
        "Each verb is one step of the pipeline; `snakemake` runs them all.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(run: Callable[[argparse.Namespace], None], summary: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(run.__name__, help=summary, description=summary[0].upper() + summary[1:] + ".")
        made.set_defaults(verb=run)
        return made

    def configured(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
        source = made.add_mutually_exclusive_group(required=True)
        source.add_argument("--config", metavar="FILE", help="config of a run, such as config/demo.yaml")
        source.add_argument(
            "--job", metavar="JSON", help="exactly the settings of this job, as the workflow gives them"
        )
        made.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override one config setting")
        return made

    def folders(made: argparse.ArgumentParser, **options: str) -> None:
        for name, what in options.items():
            made.add_argument(f"--{name}", metavar="DIR", type=Path, required=True, help=what)

    def sources(made: argparse.ArgumentParser) -> None:
        source = made.add_mutually_exclusive_group(required=True)
        source.add_argument("--rows", type=Path, metavar="DIR", help="folder written by `tapernorm rows`: training")
        source.add_argument("--bench", type=Path, metavar="FILE", help="written by `tapernorm bench`: decoding")

    def device(made: argparse.ArgumentParser) -> None:
        made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))

    made = configured(verb(corpus, "read the text, split it, and write its documents with a manifest"))
    folders(made, out="folder for train.jsonl, valid.jsonl and manifest.json")

    made = configured(verb(tokenizer, "train a SentencePiece tokenizer on the training split"))
    folders(made, corpus="folder written by `tapernorm corpus`", out="folder for tokenizer.model and manifest.json")

    made = configured(verb(tokens, "encode both splits into memory-mapped token streams"))
    folders(made, corpus="folder written by `tapernorm corpus`", tokenizer="folder written by `tapernorm tokenizer`")
    folders(made, out="folder for train.bin, valid.bin and manifest.json")

    made = configured(verb(pretrain, "train one model of the run, or resume it, and score it at g = 0"))
    made.add_argument("--variant", choices=VARIANTS, help="with --config: which variant")
    made.add_argument("--width", type=int, metavar="D", help="with --config: which d_model")
    made.add_argument("--seed", type=int, metavar="S", help="with --config: which seed")
    folders(made, tokens="folder written by `tapernorm tokens`", out="run folder: metrics, weights, result.json")
    made.add_argument("--hardware", metavar="JSON", help="with --job: the hardware section of a config")
    made.add_argument("--threads", type=_positive, metavar="N", help="CPU threads, in place of hardware.threads")

    made = verb(evaluate, "score a finished model on a token stream")
    folders(made, model="run folder of `tapernorm pretrain`", tokens="folder written by `tapernorm tokens`")
    made.add_argument("--split", default="valid", choices=("train", "valid"))
    made.add_argument("--batch", type=_positive, default=16, metavar="N", help="windows per forward pass")
    device(made)
    made.add_argument("--out", type=Path, metavar="FILE", help="also write the scores there, as JSON")

    made = verb(fold, "fold a finished run's tapered norms into its linear maps, and score what is left")
    folders(made, model="run folder of `tapernorm pretrain`", tokens="folder written by `tapernorm tokens`")
    folders(made, out="folder for unfused/, fused/ and result.json")
    device(made)
    made.add_argument("--threads", type=_positive, default=1, metavar="N", help="CPU threads")

    made = verb(generate, "continue a prompt, streaming the text")
    folders(made, checkpoint="run folder of `tapernorm pretrain`, or a folder that `tapernorm fold` wrote")
    made.add_argument("--prompt", required=True, help="the text to continue")
    made.add_argument("--tokenizer", type=Path, metavar="DIR", help="its tokenizer; default: that of its run")
    made.add_argument("--new-tokens", type=_positive, metavar="N", help="at most; default: what the context leaves")
    made.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: always the likeliest token")
    made.add_argument("--top-k", type=_positive, metavar="K", help="draw from the K likeliest tokens")
    made.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that hold P together")
    made.add_argument("--seed", type=int, default=0, metavar="S")
    made.add_argument("--compile", action="store_true", help="torch.compile the decoding step; CUDA graphs on a GPU")
    device(made)

    made = configured(verb(bench, "time decoding with and without norms"))
    made.add_argument("name", choices=("decode", "last_token"), help="with a KV cache, or one forward of the prompt")
    folders(made, model="run folder of a tapered model")
    made.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file for the raw samples")
    device(made)

    made = verb(rows, "gather finished runs into tidy CSV files")
    made.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="result.json files")
    made.add_argument("--run", required=True, help="name of the run")
    folders(made, out="folder for results.csv and curves.csv")

    made = configured(verb(table, "write a table as CSV, Markdown and LaTeX"))
    made.add_argument("name", choices=("table1", "table2", "table2x", "table2v1"))
    sources(made)
    folders(made, out="folder for the table")

    made = configured(verb(figure, "draw a figure as PDF and PNG, with the CSV that it draws"))
    made.add_argument("name", choices=("figure1a", "figure1b", "figure2", "figure_decode"))
    sources(made)
    folders(made, out="folder for the figure")

    made = verb(schema, "write the JSON schema that every config is validated against")
    made.add_argument("--out", type=Path, required=True, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
