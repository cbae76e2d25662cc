"""The verbs that turn text into tokens: corpus, tokenizer, tokens."""

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

_CORPUS, _TOKENIZER = "folder that `tapernorm corpus` wrote", "folder that `tapernorm tokenizer` wrote"
_TEXT = "with --config: a text of its gpt2 section (base, train, or the name of a corpus)"
_INPUTS = ("corpus", "tokenizer", "rows", "seen")


def add(verbs: Verbs) -> None:
    """Add these verbs to the command line."""
    table = {
        "--text NAME": f"{_TEXT}; default: the text for pre-training",
        "--out DIR!": "folder to write train.jsonl, valid.jsonl and manifest.json into",
    }
    config_options(
        verbs.add(
            corpus,
            "read a text, split it into train and valid, and write its documents and a manifest",
            table | OVERWRITE,
        )
    )
    table = {
        "--gpt2": "with --config: make the tokenizer of its gpt2 section",
        "--corpus DIR": f"{_CORPUS}, to train the tokenizer on; not for a published one",
        "--out DIR!": "folder to write the tokenizer and manifest.json into",
    }
    summary = "train a tokenizer on the train split of a corpus, or copy the published one of GPT-2"
    config_options(verbs.add(tokenizer, summary, table | OVERWRITE))
    table = {
        "--text NAME": f"{_TEXT}, cut into blocks; default: the text for pre-training, as streams",
        "--corpus DIR": f"{_CORPUS}, to encode",
        "--tokenizer DIR": f"{_TOKENIZER}, to encode with",
        "--rows DIR": "for a corpus of kind filtered: blocks whose valid split is filtered",
        "--seen DIR": "for a corpus of kind filtered: blocks whose train split has the tokens to keep",
        "--out DIR!": "folder to write train.bin, valid.bin and manifest.json into",
    }
    summary = "encode both splits of a corpus into token streams, or into blocks of one length for GPT-2"
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
        require_options(arguments, "a --job, which holds all settings,", of=(option,))


_PRODUCTS = {  # class of the job -> its product in messages, the kind of its folder, the options of its inputs
    CorpusJob: ("a corpus", "corpus", ()),
    TokenizerJob: ("a trained tokenizer", "tokenizer", ("corpus",)),
    BpeJob: ("a published tokenizer", "tokenizer", ()),
    TokensJob: ("a token stream", "tokens", ("corpus", "tokenizer")),
    BlocksJob: ("a text cut into blocks", "blocks", ("corpus", "tokenizer")),
    HubRowsJob: ("a tokenized text", "blocks", ("tokenizer",)),
    FilterJob: ("a filtered text", "blocks", ("rows", "seen")),
}


def _make(arguments: argparse.Namespace, job: Strict) -> None:
    """Write the product of `job` into --out. The job and the content of its inputs identify the folder."""
    product, kind, inputs = _PRODUCTS[type(job)]
    require_options(arguments, product, needs=inputs, of=[name for name in _INPUTS if name in arguments])
    made_from = {name: content_of(getattr(arguments, name)) for name in inputs}
    work = Work(kind, json.loads(canonical_json({"job": job.model_dump(mode="json"), **made_from})))
    writing = announced(f"writing {product} into {arguments.out}")
    with output_folder(arguments.out, work, overwrite=arguments.overwrite), writing:
        _write(job, *(getattr(arguments, name) for name in inputs), arguments.out)


def _write(job: Strict, *folders: Path) -> None:
    """Write the product of `job`; `folders` are its inputs and, last, its output."""
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
