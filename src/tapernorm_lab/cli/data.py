"""Verbs that make text into tokens: corpus, tokenizer, bpe, tokens, blocks, hubrows, filter."""

import argparse
import json
from contextlib import AbstractContextManager
from pathlib import Path

from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json

from ..config.jobs import (
    BlocksJob,
    BpeJob,
    CorpusJob,
    FilterJob,
    HubRowsJob,
    TokenizerJob,
    TokensJob,
)
from ..config.run import Config
from ..config.sections import Strict
from ..data.manifest import content_of
from ..training.outputs import Work, output_folder
from .arguments import (
    Verbs,
    cell_of,
    folders,
    job_of,
    output,
)

_CORPUS, _TOKENIZER = "folder written by `tapernorm corpus`", "folder written by `tapernorm tokenizer`"
_ANY_TOKENIZER = "folder written by `tapernorm tokenizer` or `tapernorm bpe`"
_BLOCKS = "folder written by `tapernorm blocks`"
_TEXT = "with --config: a text of the GPT-2 track (base, train, or one of its corpora)"


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(corpus, "read the text, split it, and write its documents with a manifest", configured=True)
    made.add_argument("--text", metavar="NAME", help=f"{_TEXT}; default: the text that is pre-trained on")
    output(made, "folder for train.jsonl, valid.jsonl and manifest.json")

    made = verbs.add(tokenizer, "train a SentencePiece tokenizer on the training split", configured=True)
    made.add_argument("--gpt2", action="store_true", help="with --config: the GPT-2 track's tokenizer")
    folders(made, corpus=_CORPUS)
    output(made, "folder for tokenizer.model and manifest.json")

    made = verbs.add(bpe, "take a published GPT-2 tokenizer, from the hub or a folder", configured=True)
    output(made, "folder for its files and manifest.json")

    made = verbs.add(tokens, "encode both splits into memory-mapped token streams", configured=True)
    folders(made, corpus=_CORPUS, tokenizer=_TOKENIZER)
    output(made, "folder for train.bin, valid.bin and manifest.json")

    made = verbs.add(blocks, "encode both splits and cut them into blocks of one length", configured=True)
    made.add_argument("--text", metavar="NAME", help=_TEXT)
    folders(made, corpus=_CORPUS, tokenizer=_ANY_TOKENIZER)
    output(made, "folder for train.bin, valid.bin and manifest.json")

    made = verbs.add(hubrows, "take rows that come tokenized, from the hub or a folder", configured=True)
    made.add_argument("--text", metavar="NAME", help=_TEXT)
    folders(made, tokenizer=_ANY_TOKENIZER)
    output(made, "folder for valid.bin and manifest.json")

    made = verbs.add(filter, "drop the rows that hold a token which another text never has", configured=True)
    made.add_argument("--text", metavar="NAME", help=_TEXT)
    folders(made, rows=f"{_BLOCKS} or `tapernorm hubrows`: what is filtered, its valid split")
    folders(made, seen=f"{_BLOCKS}: the text, its train split")
    output(made, "folder for valid.bin and manifest.json")


def corpus(arguments: argparse.Namespace) -> None:
    from ..data.corpus import build_corpus

    _only_with_config(arguments, text=arguments.text is not None)

    def cut(config: Config) -> CorpusJob:
        return config.corpus_job() if arguments.text is None else config.gpt2_corpus_job(arguments.text)

    job = job_of(arguments, CorpusJob, cut)
    with _held(arguments, "corpus", job):
        build_corpus(job, arguments.out)


def tokenizer(arguments: argparse.Namespace) -> None:
    from ..data.sentencepiece import train_tokenizer

    _only_with_config(arguments, gpt2=arguments.gpt2)
    job = job_of(arguments, TokenizerJob, Config.gpt2_tokenizer_job if arguments.gpt2 else Config.tokenizer_job)
    with _held(arguments, "tokenizer", job, corpus=arguments.corpus):
        train_tokenizer(job, arguments.corpus, arguments.out)


def bpe(arguments: argparse.Namespace) -> None:
    from ..data.hf_tokenizer import save_bpe

    job = job_of(arguments, BpeJob, Config.bpe_job)
    with _held(arguments, "tokenizer", job):
        save_bpe(job, arguments.out)


def tokens(arguments: argparse.Namespace) -> None:
    from ..data.token_stream import write_tokens

    job = job_of(arguments, TokensJob, Config.tokens_job)
    with _held(arguments, "tokens", job, corpus=arguments.corpus, tokenizer=arguments.tokenizer):
        write_tokens(arguments.corpus, arguments.tokenizer, arguments.out, job.context)


def blocks(arguments: argparse.Namespace) -> None:
    from ..data.blocks import write_blocks

    (text,) = cell_of(arguments, "text")
    job = job_of(arguments, BlocksJob, lambda config: config.blocks_job(text))
    with _held(arguments, "blocks", job, corpus=arguments.corpus, tokenizer=arguments.tokenizer):
        write_blocks(job, arguments.corpus, arguments.tokenizer, arguments.out)


def hubrows(arguments: argparse.Namespace) -> None:
    from ..data.hub_rows import write_hub_rows

    (text,) = cell_of(arguments, "text")
    job = job_of(arguments, HubRowsJob, lambda config: config.hub_rows_job(text))
    with _held(arguments, "blocks", job, tokenizer=arguments.tokenizer):
        write_hub_rows(job, arguments.tokenizer, arguments.out)


def filter(arguments: argparse.Namespace) -> None:
    from ..data.filter_rows import filter_rows

    (text,) = cell_of(arguments, "text")
    job = job_of(arguments, FilterJob, lambda config: config.filter_job(text))
    with _held(arguments, "blocks", job, rows=arguments.rows, seen=arguments.seen):
        manifest = filter_rows(job, arguments.rows, arguments.seen, arguments.out)
    print(f"kept {manifest['splits']['valid']['rows']} of {manifest['details']['rows']} rows")


def _held(arguments: argparse.Namespace, kind: str, job: Strict, **inputs: Path) -> AbstractContextManager[None]:
    """Hold --out for a job of this kind; what it is made from, by content, is part of whose it is."""
    made_from = {name: content_of(folder) for name, folder in inputs.items()}
    work = Work(kind, json.loads(canonical_json({"job": job.model_dump(mode="json"), **made_from})))
    return output_folder(arguments.out, work, overwrite=arguments.overwrite)


def _only_with_config(arguments: argparse.Namespace, **given: bool) -> None:
    """Raise UserError for an option that chooses a job of a --config file and comes with a --job."""
    if arguments.job is not None and (wrong := [f"--{name}" for name, there in given.items() if there]):
        raise UserError(f"{', '.join(wrong)} chooses a job of a --config file; a --job names its own")
