"""Verbs that make text into tokens: corpus, tokenizer, tokens."""

import argparse
import json
from pathlib import Path

from tapernorm.util.hashing import canonical_json
from tapernorm.util.progress import announced

from ..config.jobs import BlocksJob, BpeJob, CorpusJob, FilterJob, HubRowsJob, TokenizerJob, TokensJob
from ..config.run import Config
from ..config.sections import Strict
from ..data.manifest import content_of
from ..training.outputs import Work, output_folder
from .arguments import OVERWRITE, Verbs, config_options, job_of, require_options

_CORPUS, _TOKENIZER = "folder written by `tapernorm corpus`", "folder written by `tapernorm tokenizer`"
_TEXT = "with --config: a text of the GPT-2 track (base, train, or one of its corpora)"
_INPUTS = ("corpus", "tokenizer", "rows", "seen")


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    table = {
        "--text NAME": f"{_TEXT}; default: the text that is pre-trained on",
        "--out DIR!": "folder for train.jsonl, valid.jsonl and manifest.json",
    }
    config_options(
        verbs.add(corpus, "read the text, split it, and write its documents with a manifest", table | OVERWRITE)
    )
    table = {
        "--gpt2": "with --config: the GPT-2 track's tokenizer, trained or published",
        "--corpus DIR": f"{_CORPUS}, for a tokenizer that is trained",
        "--out DIR!": "folder for its files and manifest.json",
    }
    summary = "train a tokenizer on the training split, or take a published one of GPT-2"
    config_options(verbs.add(tokenizer, summary, table | OVERWRITE))
    table = {
        "--text NAME": f"{_TEXT}: its blocks; default: streams to pre-train on",
        "--corpus DIR": f"{_CORPUS}: what is encoded",
        "--tokenizer DIR": f"{_TOKENIZER}; needed for all texts but filtered ones",
        "--rows DIR": "for a filtered text: blocks, whose valid split is filtered",
        "--seen DIR": "for a filtered text: blocks, whose train split has the tokens to keep",
        "--out DIR!": "folder for train.bin, valid.bin and manifest.json",
    }
    summary = "encode both splits into token streams, or into blocks of one length for GPT-2"
    config_options(verbs.add(tokens, summary, table | OVERWRITE))


def corpus(arguments: argparse.Namespace) -> None:
    def cut(config: Config) -> CorpusJob:
        return config.corpus_job() if arguments.text is None else config.gpt2_corpus_job(arguments.text)

    _only_with_config(arguments, "text")
    _make(arguments, job_of(arguments, CorpusJob, cut))


def tokenizer(arguments: argparse.Namespace) -> None:
    def cut(config: Config) -> TokenizerJob | BpeJob:
        if not arguments.gpt2:
            return config.tokenizer_job()
        return config.bpe_job() if config.gpt2 and config.gpt2.bpe else config.gpt2_tokenizer_job()

    _only_with_config(arguments, "gpt2")
    _make(arguments, job_of(arguments, TokenizerJob, cut, BpeJob))


def tokens(arguments: argparse.Namespace) -> None:
    def cut(config: Config) -> TokensJob | BlocksJob | HubRowsJob | FilterJob:
        if arguments.text is None:
            return config.tokens_job()
        kinds = {corpus.name: corpus.kind for corpus in config.gpt2.corpora} if config.gpt2 else {}
        of_kind = {"rows": config.hub_rows_job, "filtered": config.filter_job}
        return of_kind.get(kinds.get(arguments.text, ""), config.blocks_job)(arguments.text)

    _only_with_config(arguments, "text")
    _make(arguments, job_of(arguments, TokensJob, cut, BlocksJob, HubRowsJob, FilterJob))


def _only_with_config(arguments: argparse.Namespace, option: str) -> None:
    if arguments.job is not None:
        require_options(arguments, "a --job, which names its own settings,", of=(option,))


_PRODUCTS = {  # kind of job -> what it makes in words, the kind of its folder, its inputs
    CorpusJob: ("a corpus", "corpus", ()),
    TokenizerJob: ("a tokenizer that is trained", "tokenizer", ("corpus",)),
    BpeJob: ("a published tokenizer", "tokenizer", ()),
    TokensJob: ("a token stream", "tokens", ("corpus", "tokenizer")),
    BlocksJob: ("a text in blocks", "blocks", ("corpus", "tokenizer")),
    HubRowsJob: ("a text that comes tokenized", "blocks", ("tokenizer",)),
    FilterJob: ("a filtered text", "blocks", ("rows", "seen")),
}


def _make(arguments: argparse.Namespace, job: Strict) -> None:
    """Make what `job` asks for into --out, whose owner it is together with the content of its inputs."""
    product, kind, inputs = _PRODUCTS[type(job)]
    require_options(arguments, product, needs=inputs, of=[name for name in _INPUTS if name in arguments])
    made_from = {name: content_of(getattr(arguments, name)) for name in inputs}
    work = Work(kind, json.loads(canonical_json({"job": job.model_dump(mode="json"), **made_from})))
    writing = announced(f"writing {product} into {arguments.out}")
    with output_folder(arguments.out, work, overwrite=arguments.overwrite), writing:
        _write(job, *(getattr(arguments, name) for name in inputs), arguments.out)


def _write(job: Strict, *folders: Path) -> None:
    """Write what `job` asks for; `folders`: its inputs, and the folder of its output."""
    if isinstance(job, CorpusJob):
        from ..data.corpus import build_corpus

        build_corpus(job, *folders)
    elif isinstance(job, TokenizerJob):
        from ..data.sentencepiece import train_tokenizer

        train_tokenizer(job, *folders)
    elif isinstance(job, BpeJob):
        from ..data.hf_tokenizer import save_bpe

        save_bpe(job, *folders)
    elif isinstance(job, TokensJob):
        from ..data.token_stream import write_tokens

        corpus, tokenizer, out = folders
        write_tokens(corpus, tokenizer, out, job.context)
    elif isinstance(job, BlocksJob):
        from ..data.blocks import write_blocks

        write_blocks(job, *folders)
    elif isinstance(job, HubRowsJob):
        from ..data.hub_rows import write_hub_rows

        write_hub_rows(job, *folders)
    elif isinstance(job, FilterJob):
        from ..data.filter_rows import filter_rows

        manifest = filter_rows(job, *folders)
        print(f"kept {manifest['splits']['valid']['rows']} of {manifest['details']['rows']} rows")
