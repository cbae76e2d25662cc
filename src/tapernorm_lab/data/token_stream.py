"""Token streams on disk, and the training windows cut from them. B batch, T context (tokens).

A split is one flat file of ids, in which an end-of-document id ends each document. Ids have the smallest unsigned type
that holds the vocabulary, in native byte order. The file is memory-mapped. A batch is a function of (seed, step), so
that a resumed run need not replay earlier batches.
"""

import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tapernorm.util.atomic_files import sha256_of, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.rng import generator

from .corpus import SPLITS, read_documents
from .manifest import Kind, made_manifest, read_manifest, whole_files
from .sentencepiece import Tokenizer
from .tokenizers import Coder

DTYPES = {"uint16": (torch.uint16, "H"), "uint32": (torch.uint32, "I")}  # torch type, array type code
_BATCH_CHARACTERS = 1 << 18  # characters in memory at once, unless a single document is longer


@dataclass(frozen=True)
class TokenStream:
    """One split of a token folder."""

    tokens: Tensor  # (n,) uint16 or uint32, memory-mapped
    manifest: dict[str, Any]
    split: dict[str, Any]  # the manifest's entry of this split: documents, tokens, bytes of text, sha256

    @classmethod
    def open(cls, folder: Path, split: str) -> Self:
        """Memory-map one split without reading it. Raises as `open_split` and `map_ids`."""
        manifest, entry = open_split(folder, "tokens", split)
        return cls(map_ids(folder / f"{split}.bin", entry["tokens"], manifest["dtype"]), manifest, entry)


def open_split(folder: Path, kind: Kind, split: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest of a folder of this kind, and its entry of one split.

    Raises:
        UserError: the manifest cannot be read (`read_manifest`), or has no such split.
    """
    manifest = read_manifest(folder, kind)
    if split not in manifest["splits"]:
        raise UserError(f"{folder} has no split {split!r}; it has {', '.join(manifest['splits'])}")
    return manifest, manifest["splits"][split]


def smallest_dtype(vocab_size: int) -> str:
    """Return the name of the smallest type that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def map_ids(path: Path, count: int, dtype: str) -> Tensor:
    """Memory-map a file of `count` ids, (count,), without reading it.

    Raises:
        UserError: the dtype is unknown, or the size of the file differs from `count`.
    """
    if dtype not in DTYPES:
        raise UserError(f"{path.parent / 'manifest.json'} has dtype {dtype!r}; known: {', '.join(DTYPES)}")
    kind, _ = DTYPES[dtype]
    size = path.stat().st_size if path.is_file() else 0
    if size != count * kind.itemsize:
        raise UserError(
            f"{path} has {size} bytes, but its manifest says {count} tokens of {kind.itemsize} bytes: "
            "it was cut short or replaced; run `tapernorm tokens` again"
        )
    return torch.from_file(str(path), shared=False, size=count, dtype=kind)


def windows(stream: TokenStream, *, seed: int, step: int, batch: int, context: int) -> Tensor:
    """Return `batch` windows with offsets uniform over the stream, (B, T+1) int64, a pure function of (seed, step).

    Raises:
        UserError: the stream is shorter than one window.
    """
    offsets = len(stream.tokens) - context
    _require_a_window("the stream", len(stream.tokens), context)
    starts = torch.randint(offsets, (batch,), generator=generator(seed, f"windows/{step}"))
    return torch.stack([stream.tokens[start : start + context + 1].to(torch.int64) for start in starts.tolist()])


def write_tokens(corpus: Path, tokenizer: Path, out: Path, context: int) -> dict[str, Any]:
    """Encode both splits of `corpus` into `out`, and return the manifest.

    The tokenizer may come from another corpus: the manifest holds the hashes of both.

    Raises:
        UserError: a split is shorter than one window of `context` + 1 tokens, or the corpus differs from its manifest.
    """
    coder = Tokenizer(tokenizer)
    described = read_manifest(corpus, "corpus")["splits"]
    with whole_files(out, *(f"{split}.bin" for split in SPLITS)) as files:
        splits = {}
        for split in SPLITS:
            path = files[f"{split}.bin"]
            counts = encode_split(corpus, split, coder, path)
            _require_a_window(f"the {split} split", counts["tokens"], context)
            splits[split] = {**counts, "sha256": sha256_of(path)}
        manifest = made_manifest(
            "tokens",
            dtype=smallest_dtype(coder.vocab_size),
            vocab_size=coder.vocab_size,
            eod=coder.eod,
            tokenizer_sha256=coder.manifest["sha256"],
            tokenizer_corpus_sha256=coder.manifest["corpus_sha256"],
            corpus_sha256={split: described[split]["sha256"] for split in SPLITS},
            splits=splits,
        )
        write_json(files["manifest.json"], manifest)
    return manifest


def encode_split(
    corpus: Path, split: str, coder: Coder, path: Path, *, row: int = 1, group: int | None = None
) -> dict[str, int]:
    """Write the ids of one split of `corpus` into `path`, with an end-of-document id after each document.

    Only whole rows of `row` ids are written. The remainder after every `group` documents is dropped. Returns the
    numbers of documents, tokens and bytes that were encoded.

    Raises:
        UserError: the corpus differs from its manifest.
    """
    counts = {"documents": 0, "tokens": 0, "bytes": 0}
    ids = array.array(DTYPES[smallest_dtype(coder.vocab_size)][1])  # encoded but not yet written
    source = corpus / f"{split}.jsonl"
    with open(path, "wb") as file:
        for texts in batches(read_documents(source)):
            for text, encoded in zip(texts, coder.encode_batch(texts), strict=True):
                ids.extend(encoded)
                ids.append(coder.eod)
                counts["documents"] += 1
                counts["tokens"] += len(encoded) + 1
                counts["bytes"] += len(text.encode("utf-8"))
                whole = len(ids) // row * row
                ids[:whole].tofile(file)
                del ids[:whole]
                if group and counts["documents"] % group == 0:
                    del ids[:]
    _refuse_changed(source, counts, read_manifest(corpus, "corpus")["splits"][split])
    return counts


def batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield documents in order, in lists of about `_BATCH_CHARACTERS` characters."""
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _refuse_changed(path: Path, found: dict[str, int], described: dict[str, Any]) -> None:
    """Raise UserError if the documents or bytes read from a corpus file differ from its manifest."""
    for unit in ("documents", "bytes"):
        if found[unit] != described[unit]:
            raise UserError(
                f"{path} holds {found[unit]} {unit} of text, but its manifest says {described[unit]}: "
                "it was cut short or replaced; run `tapernorm corpus` again"
            )


def _require_a_window(what: str, tokens: int, context: int) -> None:
    if tokens <= context:
        raise UserError(
            f"{what} has {tokens} tokens, but one window takes {context + 1} (model.context {context} and one target). "
            "Add text, raise data.valid_fraction if the validation split is too short, or lower model.context"
        )
