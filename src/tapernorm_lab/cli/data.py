"""Verbs that make text into tokens: corpus, tokenizer, tokens."""

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
from .arguments import Verbs, config_options, job_of, output, path, require_inputs

_CORPUS, _TOKENIZER = "folder written by `tapernorm corpus`", "folder written by `tapernorm tokenizer`"
_TEXT = "with --config: a text of the GPT-2 track (base, train, or one of its corpora)"


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    made = verbs.add(corpus, "read the text, split it, and write its documents with a manifest")
    config_options(made)
    made.add_argument("--text", metavar="NAME", help=f"{_TEXT}; default: the text that is pre-trained on")
    output(made, "folder for train.jsonl, valid.jsonl and manifest.json")

    made = verbs.add(tokenizer, "train a tokenizer on the training split, or take a published one of GPT-2")
    config_options(made)
    made.add_argument(
        "--gpt2", action="store_true", help="with --config: the GPT-2 track's tokenizer, trained or published"
    )
    made.add_argument("--corpus", type=path, metavar="DIR", help=f"{_CORPUS}, for a tokenizer that is trained")
    output(made, "folder for its files and manifest.json")

    made = verbs.add(tokens, "encode both splits into token streams, or into blocks of one length for GPT-2")
    config_options(made)
    made.add_argument("--text", metavar="NAME", help=f"{_TEXT}: its blocks; default: streams to pre-train on")
    made.add_argument("--corpus", type=path, metavar="DIR", help=f"{_CORPUS}: what is encoded")
    made.add_argument(
        "--tokenizer", type=path, metavar="DIR", help=f"{_TOKENIZER}; needed for all texts but filtered ones"
    )
    made.add_argument(
        "--rows", type=path, metavar="DIR", help="for a filtered text: blocks, whose valid split is filtered"
    )
    made.add_argument(
        "--seen", type=path, metavar="DIR", help="for a filtered text: blocks, whose train split has the tokens to keep"
    )
    output(made, "folder for train.bin, valid.bin and manifest.json")


def corpus(arguments: argparse.Namespace) -> None:
    from ..data.corpus import build_corpus

    _only_with_config(arguments, text=arguments.text is not None)

    def cut(config: Config) -> CorpusJob:
        return config.corpus_job() if arguments.text is None else config.gpt2_corpus_job(arguments.text)

    job = job_of(arguments, CorpusJob, cut)
    with _held(arguments, "corpus", job):
        build_corpus(job, arguments.out)


def tokenizer(arguments: argparse.Namespace) -> None:
    _only_with_config(arguments, gpt2=arguments.gpt2)

    def cut(config: Config) -> TokenizerJob | BpeJob:
        if not arguments.gpt2:
            return config.tokenizer_job()
        return config.bpe_job() if config.gpt2 and config.gpt2.bpe else config.gpt2_tokenizer_job()

    job = job_of(arguments, TokenizerJob, cut, BpeJob)
    given = {"corpus": arguments.corpus}
    if isinstance(job, BpeJob):
        require_inputs(f"the published tokenizer {job.source}", given, ())
        from ..data.hf_tokenizer import save_bpe

        with _held(arguments, "tokenizer", job):
            save_bpe(job, arguments.out)
        return
    require_inputs("a tokenizer that is trained", given, ("corpus",))
    from ..data.sentencepiece import train_tokenizer

    with _held(arguments, "tokenizer", job, corpus=arguments.corpus):
        train_tokenizer(job, arguments.corpus, arguments.out)


def tokens(arguments: argparse.Namespace) -> None:
    _only_with_config(arguments, text=arguments.text is not None)
    job = job_of(
        arguments, TokensJob, lambda config: _cut_tokens(config, arguments.text), BlocksJob, HubRowsJob, FilterJob
    )
    what, kind, needed = {
        TokensJob: ("a token stream", "tokens", ("corpus", "tokenizer")),
        BlocksJob: ("a text in blocks", "blocks", ("corpus", "tokenizer")),
        HubRowsJob: ("a text that comes tokenized", "blocks", ("tokenizer",)),
        FilterJob: ("a filtered text", "blocks", ("rows", "seen")),
    }[type(job)]
    given = {name: getattr(arguments, name) for name in ("corpus", "tokenizer", "rows", "seen")}
    require_inputs(what, given, needed)
    with _held(arguments, kind, job, **{name: given[name] for name in needed}):
        _write_tokens(job, arguments)


def _cut_tokens(config: Config, text: str | None) -> TokensJob | BlocksJob | HubRowsJob | FilterJob:
    """The job that makes the tokens of a text of the GPT-2 track, by the kind of text; None: those to pre-train on."""
    if text is None:
        return config.tokens_job()
    kinds = {corpus.name: corpus.kind for corpus in config.gpt2.corpora} if config.gpt2 else {}
    cut = {"rows": config.hub_rows_job, "filtered": config.filter_job}.get(kinds.get(text, ""), config.blocks_job)
    return cut(text)


def _write_tokens(job: Strict, arguments: argparse.Namespace) -> None:
    out = arguments.out
    if isinstance(job, TokensJob):
        from ..data.token_stream import write_tokens

        write_tokens(arguments.corpus, arguments.tokenizer, out, job.context)
    elif isinstance(job, BlocksJob):
        from ..data.blocks import write_blocks

        write_blocks(job, arguments.corpus, arguments.tokenizer, out)
    elif isinstance(job, HubRowsJob):
        from ..data.hub_rows import write_hub_rows

        write_hub_rows(job, arguments.tokenizer, out)
    elif isinstance(job, FilterJob):
        from ..data.filter_rows import filter_rows

        manifest = filter_rows(job, arguments.rows, arguments.seen, out)
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
