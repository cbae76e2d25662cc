"""Token streams on disk, and the training windows cut from them. B batch, T context (tokens).

A split is one flat file of ids, each document closed by an end-of-document id, in the smallest unsigned type that
holds the vocabulary (native byte order). It is read memory-mapped. A batch is a function of (seed, step), so a resumed
run has nothing to fast-forward.
"""

import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from tapernorm.util.atomic_files import sha256_of, whole_file, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.provenance import provenance
from tapernorm.util.rng import generator

from .corpus import SPLITS, read_documents
from .manifest import SCHEMA_VERSION, read_manifest
from .sentencepiece import Tokenizer
from .sources import Split

DTYPES = {"uint16": (torch.uint16, "H"), "uint32": (torch.uint32, "I")}  # torch type, array type code
_BATCH_CHARACTERS = 1 << 18  # text held in memory at once, a longer document apart


@dataclass(frozen=True)
class TokenStream:
    """One split of a token folder."""

    tokens: Tensor  # (n,) uint16 or uint32, memory-mapped
    manifest: dict[str, Any]
    split: dict[str, Any]  # the manifest's entry of this split: documents, tokens, bytes of text, sha256

    @classmethod
    def open(cls, folder: Path, split: str) -> Self:
        """Map one split; nothing is read yet.

        Raises:
            UserError: the folder holds no token stream of this schema version, no such split, or a file whose size is
                not what the manifest says.
        """
        manifest = read_manifest(folder, "tokens")
        if split not in manifest["splits"]:
            raise UserError(f"{folder} has no split {split!r}; it has {', '.join(manifest['splits'])}")
        entry = manifest["splits"][split]
        return cls(map_ids(folder / f"{split}.bin", entry["tokens"], manifest["dtype"]), manifest, entry)


def smallest_dtype(vocab_size: int) -> str:
    """The name of the smallest type that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def map_ids(path: Path, count: int, dtype: str) -> Tensor:
    """Map a file of `count` ids, (count,); nothing is read yet.

    Raises:
        UserError: the file is missing or of another size.
    """
    if dtype not in DTYPES:
        raise UserError(f"{path.parent / 'manifest.json'} has dtype {dtype!r}; known: {', '.join(DTYPES)}")
    kind, _ = DTYPES[dtype]
    size = path.stat().st_size if path.is_file() else 0
    if size != count * kind.itemsize:
        raise UserError(
            f"{path} has {size} bytes and its manifest says {count} tokens of {kind.itemsize} bytes: "
            "it was cut short or replaced; write the tokens again"
        )
    return torch.from_file(str(path), shared=False, size=count, dtype=kind)


def windows(stream: TokenStream, *, seed: int, step: int, batch: int, context: int) -> Tensor:
    """(B, T+1) int64: `batch` windows whose offsets are uniform over the stream, a pure function of (seed, step).

    Raises:
        UserError: the stream is shorter than one window.
    """
    offsets = len(stream.tokens) - context
    if offsets < 1:
        raise UserError(_too_short("the stream", len(stream.tokens), context))
    starts = torch.randint(offsets, (batch,), generator=generator(seed, f"windows/{step}"))
    return torch.stack([stream.tokens[start : start + context + 1].to(torch.int64) for start in starts.tolist()])


def write_tokens(corpus: Path, tokenizer: Path, out: Path, context: int) -> dict[str, Any]:
    """Encode both splits of `corpus` into `out`; returns the manifest. Memory does not grow with the corpus.

    The tokenizer may come from another corpus. The manifest holds the hashes of the corpus, of the tokenizer and of the
    corpus that the tokenizer was trained on, so a reader sees which.

    Raises:
        UserError: a split is shorter than one window of `context` + 1 tokens, the corpus is not what its manifest
            describes, or a document cannot be encoded. Nothing half-written is left.
    """
    coder = Tokenizer(tokenizer)
    described = read_manifest(corpus, "corpus")["splits"]
    dtype = smallest_dtype(coder.vocab_size)
    with (
        whole_file(out / "manifest.json") as manifest_file,
        whole_file(out / "train.bin") as train_file,
        whole_file(out / "valid.bin") as valid_file,
    ):
        files: dict[Split, Path] = {"train": train_file, "valid": valid_file}
        splits = {}
        for split in SPLITS:
            source = corpus / f"{split}.jsonl"
            with open(files[split], "wb") as file:
                splits[split] = _encode(read_documents(source), coder, dtype, file)
            refuse_changed(source, splits[split], described[split])
            if splits[split]["tokens"] <= context:
                raise UserError(_too_short(f"the {split} split", splits[split]["tokens"], context))
            splits[split]["sha256"] = sha256_of(files[split])
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "kind": "tokens",
            "dtype": dtype,
            "vocab_size": coder.vocab_size,
            "eod": coder.eod,
            "tokenizer_sha256": coder.manifest["sha256"],
            "tokenizer_corpus_sha256": coder.manifest["corpus_sha256"],
            "corpus_sha256": {split: described[split]["sha256"] for split in SPLITS},
            "splits": splits,
            "provenance": provenance(),
        }
        write_json(manifest_file, manifest)
    return manifest


def _encode(documents: Iterable[str], coder: Tokenizer, dtype: str, file: BinaryIO) -> dict[str, Any]:
    counts = {"documents": 0, "tokens": 0, "bytes": 0}
    _, code = DTYPES[dtype]
    for texts in batches(documents):
        ids = array.array(code)
        for document in coder.encode_batch(texts):
            ids.extend(document)
            ids.append(coder.eod)
        ids.tofile(file)
        counts["documents"] += len(texts)
        counts["tokens"] += len(ids)
        counts["bytes"] += sum(len(text.encode("utf-8")) for text in texts)
    return counts


def batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in order, in lists of about `_BATCH_CHARACTERS`."""
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


def refuse_changed(path: Path, found: dict[str, Any], described: dict[str, Any]) -> None:
    """Raise UserError where what was read of a corpus file is not what its manifest describes."""
    for unit in ("documents", "bytes"):
        if found[unit] != described[unit]:
            raise UserError(
                f"{path} holds {found[unit]} {unit} of text and its manifest says {described[unit]}: "
                "it was cut short or replaced; build the corpus again"
            )


def _too_short(what: str, tokens: int, context: int) -> str:
    return (
        f"{what} has {tokens} tokens and one window takes {context + 1} (model.context {context} and the target after "
        "it): add text, raise data.valid_fraction if validation is the short one, or lower model.context"
    )
