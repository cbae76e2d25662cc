"""Verbs that make text into tokens: corpus, tokenizer, bpe, tokens, blocks, hubrows, filter."""

import argparse

from ..config import Config
from ..errors import UserError
from ..jobs import BlocksJob, BpeJob, CorpusJob, FilterJob, HubRowsJob, TokenizerJob, TokensJob
from ..runlock import run_lock
from .arguments import Verbs, cell_of, folders, job_of

_CORPUS, _TOKENIZER = "folder written by `tapernorm corpus`", "folder written by `tapernorm tokenizer`"
_ANY_TOKENIZER = "folder written by `tapernorm tokenizer` or `tapernorm bpe`"
_BLOCKS = "folder written by `tapernorm blocks`"
_TEXT = "with --config: a text of the GPT-2 track (base, train, or one of its corpora)"


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(corpus, "read the text, split it, and write its documents with a manifest", configured=True)
    made.add_argument("--text", metavar="NAME", help=f"{_TEXT}; default: the text that is pre-trained on")
    folders(made, out="folder for train.jsonl, valid.jsonl and manifest.json")

    made = verbs.add(tokenizer, "train a SentencePiece tokenizer on the training split", configured=True)
    made.add_argument("--gpt2", action="store_true", help="with --config: the GPT-2 track's tokenizer")
    folders(made, corpus=_CORPUS, out="folder for tokenizer.model and manifest.json")

    made = verbs.add(bpe, "take a published GPT-2 tokenizer, from the hub or a folder", configured=True)
    folders(made, out="folder for its files and manifest.json")

    made = verbs.add(tokens, "encode both splits into memory-mapped token streams", configured=True)
    folders(made, corpus=_CORPUS, tokenizer=_TOKENIZER, out="folder for train.bin, valid.bin and manifest.json")

    made = verbs.add(blocks, "encode both splits and cut them into blocks of one length", configured=True)
    made.add_argument("--text", metavar="NAME", help=_TEXT)
    folders(made, corpus=_CORPUS, tokenizer=_ANY_TOKENIZER, out="folder for train.bin, valid.bin and manifest.json")

    made = verbs.add(hubrows, "take rows that come tokenized, from the hub or a folder", configured=True)
    made.add_argument("--text", metavar="NAME", help=_TEXT)
    folders(made, tokenizer=_ANY_TOKENIZER, out="folder for valid.bin and manifest.json")

    made = verbs.add(filter, "drop the rows that hold a token which another text never has", configured=True)
    made.add_argument("--text", metavar="NAME", help=_TEXT)
    folders(made, rows=f"{_BLOCKS} or `tapernorm hubrows`: what is filtered, its valid split")
    folders(made, seen=f"{_BLOCKS}: the text, its train split", out="folder for valid.bin and manifest.json")


def corpus(arguments: argparse.Namespace) -> None:
    from ..data.corpora import build_corpus

    _only_with_config(arguments, text=arguments.text is not None)

    def cut(config: Config) -> CorpusJob:
        return config.corpus_job() if arguments.text is None else config.gpt2_corpus_job(arguments.text)

    job = job_of(arguments, CorpusJob, cut)
    with run_lock(arguments.out):
        build_corpus(job, arguments.out)


def tokenizer(arguments: argparse.Namespace) -> None:
    from ..data.tokenizer import train_tokenizer

    _only_with_config(arguments, gpt2=arguments.gpt2)
    job = job_of(arguments, TokenizerJob, Config.gpt2_tokenizer_job if arguments.gpt2 else Config.tokenizer_job)
    with run_lock(arguments.out):
        train_tokenizer(job, arguments.corpus, arguments.out)


def bpe(arguments: argparse.Namespace) -> None:
    from ..data.bpe import save_bpe

    job = job_of(arguments, BpeJob, Config.bpe_job)
    with run_lock(arguments.out):
        save_bpe(job, arguments.out)


def tokens(arguments: argparse.Namespace) -> None:
    from ..data.tokens import write_tokens

    job = job_of(arguments, TokensJob, Config.tokens_job)
    with run_lock(arguments.out):
        write_tokens(arguments.corpus, arguments.tokenizer, arguments.out, job.context)


def blocks(arguments: argparse.Namespace) -> None:
    from ..data.blocks import write_blocks

    (text,) = cell_of(arguments, "text")
    job = job_of(arguments, BlocksJob, lambda config: config.blocks_job(text))
    with run_lock(arguments.out):
        write_blocks(job, arguments.corpus, arguments.tokenizer, arguments.out)


def hubrows(arguments: argparse.Namespace) -> None:
    from ..data.hubrows import write_hub_rows

    (text,) = cell_of(arguments, "text")
    job = job_of(arguments, HubRowsJob, lambda config: config.hub_rows_job(text))
    with run_lock(arguments.out):
        write_hub_rows(job, arguments.tokenizer, arguments.out)


def filter(arguments: argparse.Namespace) -> None:
    from ..data.rowfilter import filter_rows

    (text,) = cell_of(arguments, "text")
    job = job_of(arguments, FilterJob, lambda config: config.filter_job(text))
    with run_lock(arguments.out):
        manifest = filter_rows(job, arguments.rows, arguments.seen, arguments.out)
    print(f"kept {manifest['splits']['valid']['rows']} of {manifest['details']['rows']} rows")


def _only_with_config(arguments: argparse.Namespace, **given: bool) -> None:
    """Raise UserError for an option that chooses a job of a --config file and comes with a --job."""
    if arguments.job is not None and (wrong := [f"--{name}" for name, there in given.items() if there]):
        raise UserError(f"{', '.join(wrong)} chooses a job of a --config file; a --job names its own")
