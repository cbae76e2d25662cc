"""The user's texts as blocks of the model's tokens: made once and kept, or only checked."""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tapernorm.architectures import vocabulary_of
from tapernorm.util.atomic_files import read_json, sha256_of, write_json
from tapernorm.util.errors import settings_named
from tapernorm.util.hashing import digest
from tapernorm.util.progress import announced

from ..config.jobs import BlocksJob, CorpusJob
from ..config.sections import OWN_SPLIT, DataConfig
from ..data.blocks import Blocks, require_a_row, write_blocks
from ..data.corpus import Reading, Split, build_corpus, read_documents, told_of
from ..data.hf_tokenizer import save_hub_tokenizer
from ..data.manifest import read_manifest
from ..data.passages import identity_of
from ..data.sources import open_source
from ..data.tokenizers import Coder
from .options import HELD_OUT, Texts, words_of
from .resolve import TaperRun

Seen = dict[
    str, dict[str, int]
]  # scored text -> `documents`: number of its `of` distinct documents in the training text
_SEEN = "seen.json"
_VALID_ROWS = 1000  # rows to score, at most
_READ = 1 << 28  # characters of a long text that a check reads
_PREFIX = 32  # characters of a document that a check encodes, per token that the row still lacks


def prepare(run: TaperRun) -> dict[tuple[str, str], Blocks]:
    """Write the texts as blocks into `out`/data, unless they are there; return (text, split) -> blocks.

    Raises:
        UserError: a text cannot be read, or a split is empty.
    """
    tokenizer = run.out / "tokenizer"
    save_hub_tokenizer(run.base, tokenizer, vocab_size=vocabulary_of(run.skeleton))
    blocks = {}
    for name, data in run.texts.corpora.items():
        with settings_named(words_of(name)):
            folder = _blocks_of(run.out / "data" / name, data, tokenizer, run.job.context)
        for split in _splits_of(name):
            blocks[name, split] = Blocks.open(folder, split)
    for line in overlaps(_compared(run.out / "data", run.texts), run.texts):
        print(line, file=sys.stderr)
    return blocks


def check_texts(texts: Texts, coder: Coder, context: int) -> list[str]:
    """Read the texts as `prepare` does, write nothing, and return lines to print.

    A long text is read until every split has a row and `_READ` characters are read.

    Raises:
        UserError: as `prepare`.
    """
    corpora, told = texts.corpora, []
    scored: dict[str, set[bytes]] = {name: set() for name in corpora if name != HELD_OUT}
    trained: set[bytes] = set()
    for name in (*scored, HELD_OUT):
        if hub := [data.source for data in corpora[name] if data.source in OWN_SPLIT]:
            told.append(f"not checked: {', '.join(hub)}, not downloaded yet")
            continue
        with settings_named(words_of(name)):
            reading = Reading(CorpusJob(data=corpora[name]))
            counts: dict[Split, dict[str, int]] = {}
            for split in _splits_of(name):
                seen = trained if split == "train" and scored else scored.get(name)
                counts[split] = _read_split(reading, split, coder, context, seen)
            reading.refuse_empty({split: count["documents"] for split, count in counts.items()})
            for split, count in counts.items():
                require_a_row(split, count["tokens"], context)
        if (passages := reading.passages) is not None:
            trained.update(map(bytes.fromhex, passages["sha256"]))
            told.append(told_of(counts, passages))
    return [*told, *overlaps(_shared(scored, trained), texts)]


def overlaps(seen: Seen, texts: Texts) -> list[str]:
    """Return a line for each scored text that shares documents with the training text."""
    return [
        f"{texts.given[name]} is seen in training: {count['documents']} of its {count['of']} documents are also in "
        f"{texts.given[HELD_OUT]}"
        for name, count in seen.items()
    ]


def seen_in_training(run: Path) -> Seen:
    """Return how many documents the scored texts of a run share with its training text."""
    path = run / "data" / _SEEN
    return read_json(path)["seen"] if path.is_file() else {}


def _splits_of(name: str) -> tuple[Split, ...]:
    return ("valid", "train") if name == HELD_OUT else ("valid",)


def _read_split(reading: Reading, split: Split, coder: Coder, context: int, seen: set[bytes] | None) -> dict[str, int]:
    """Count documents, bytes and, up to `context`, tokens of one split; add its documents' identities to `seen`."""
    counts = {"documents": 0, "bytes": 0, "tokens": 0}
    read = 0
    for _, text in reading.documents(split):
        if seen is not None:
            seen.add(identity_of(text))
        lacking = context - counts["tokens"]
        if lacking > 0:
            ids = coder.encode(text[: lacking * _PREFIX])
            if len(ids) + 1 < lacking < len(text):
                ids = coder.encode(text)
            counts["tokens"] += len(ids) + 1
        counts["documents"] += 1
        counts["bytes"] += len(text.encode("utf-8"))
        read += len(text)
        if lacking <= 0 and read > _READ:
            break
    return counts


def _compared(folder: Path, texts: Texts) -> Seen:
    """Compare the scored texts with the training text, from the corpora in `folder`; keep the result there."""
    names = [name for name in texts.corpora if name != HELD_OUT]
    manifests = {name: read_manifest(folder / name / "corpus", "corpus") for name in (HELD_OUT, *names)}
    identity = digest({name: manifest["splits"] for name, manifest in manifests.items()})
    path = folder / _SEEN
    if path.is_file() and (known := read_json(path)).get("identity") == identity:
        return known["seen"]
    scored = {name: set(map(identity_of, read_documents(folder / name / "corpus/valid.jsonl"))) for name in names}
    trained = set().union(*scored.values()).intersection(_trained(folder, manifests[HELD_OUT])) if names else set()
    seen = _shared(scored, trained)
    write_json(path, {"identity": identity, "seen": seen})
    return seen


def _trained(folder: Path, manifest: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the identities of the training documents and passages."""
    yield from map(bytes.fromhex, manifest.get("passages", {}).get("sha256", []))
    yield from map(identity_of, read_documents(folder / HELD_OUT / "corpus/train.jsonl"))


def _shared(scored: Mapping[str, Collection[bytes]], trained: set[bytes]) -> Seen:
    counts = {name: {"documents": len(trained.intersection(ids)), "of": len(ids)} for name, ids in scored.items()}
    return {name: count for name, count in counts.items() if count["documents"]}


def _blocks_of(folder: Path, data: tuple[DataConfig, ...], tokenizer: Path, context: int) -> Path:
    """Write a text as blocks into `folder`, unless exactly these blocks are there, complete."""
    blocks_job = BlocksJob(context=context, block_documents=None, max_rows=_VALID_ROWS)
    wanted = {
        "text": text_digest(data),
        "blocks": digest([blocks_job.model_dump(mode="json"), read_manifest(tokenizer, "tokenizer")["sha256"]]),
    }
    corpus, blocks, done = folder / "corpus", folder / "blocks", folder / "blocks.json"
    if not done.is_file() or read_json(done) != wanted or not _is_whole(blocks):
        done.unlink(missing_ok=True)
        with announced(f"cutting the text {folder.name} into blocks"):
            build_corpus(CorpusJob(data=data), corpus)
            write_blocks(blocks_job, corpus, tokenizer, blocks)
        write_json(done, wanted)
    return blocks


def text_digest(data: Sequence[DataConfig]) -> str:
    """Return the digest of the configs of some texts and of the content of their files or packages."""
    return digest([CorpusJob(data=tuple(data)).model_dump(mode="json"), [open_source(d).details for d in data]])


def _is_whole(blocks: Path) -> bool:
    """Whether every split in a folder of blocks has the sha256 of its manifest."""
    if not (blocks / "manifest.json").is_file():
        return False
    splits = read_manifest(blocks, "blocks")["splits"]
    files = {blocks / f"{name}.bin": split["sha256"] for name, split in splits.items()}
    return all(path.is_file() and sha256_of(path) == sha256 for path, sha256 in files.items())
