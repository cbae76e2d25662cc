"""A corpus on disk: train.jsonl and valid.jsonl, disjoint, one document a line, with a manifest.

A document's split is its publisher's where there is one; elsewhere it is a pure function of its own text, so that no
document moves when others are added. A larger `valid_fraction` only moves documents from train to valid.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, get_args

from ..config import CorpusJob, digest
from ..errors import UserError
from ..files import sha256_of, whole_file, write_json
from ..provenance import provenance
from .manifest import SCHEMA_VERSION
from .sources import Source, Split, open_source

SPLITS: tuple[Split, ...] = get_args(Split)


def split_of(text: str, valid_fraction: float) -> Split:
    """`valid` where the first 64 bits of the text's sha256, read as a number in [0, 1), lie below `valid_fraction`."""
    head = hashlib.sha256(text.encode("utf-8")).digest()[:8]
    return "valid" if int.from_bytes(head, "big") < valid_fraction * 2.0**64 else "train"


def build_corpus(job: CorpusJob, out: Path) -> dict[str, Any]:
    """Write the corpus of `job` into `out`; returns its manifest.

    Documents without a visible character are dropped, and so are training documents that validation also holds; both
    are counted. Memory does not grow with the training split.

    Raises:
        UserError: the source cannot be read, or a split would be empty. Nothing half-written is left.
    """
    source = open_source(job.data)
    with (
        whole_file(out / "manifest.json") as manifest_file,
        whole_file(out / "train.jsonl") as train_file,
        whole_file(out / "valid.jsonl") as valid_file,
    ):
        with (
            open(train_file, "w", encoding="utf-8", newline="\n") as train,
            open(valid_file, "w", encoding="utf-8", newline="\n") as valid,
        ):
            splits, dropped = _write(source, {"train": train, "valid": valid}, job.data.valid_fraction)
        _refuse_empty(splits, job)
        splits["train"]["sha256"] = sha256_of(train_file)
        splits["valid"]["sha256"] = sha256_of(valid_file)
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "kind": "corpus",
            "source": job.data.source,
            "splits": splits,
            "dropped": dropped,
            "details": source.details,
            "provenance": provenance(config_hash=digest(job)),
        }
        write_json(manifest_file, manifest)
    return manifest


def read_documents(jsonl: Path) -> Iterator[str]:
    """Documents of one split in order, one in memory at a time.

    Raises:
        UserError: there is no such file, or it was cut short.
    """
    remedy = f"make it with `tapernorm corpus --out {jsonl.parent} …`"
    if not jsonl.is_file():
        raise UserError(f"no corpus file {jsonl}; {remedy}")
    with open(jsonl, encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = json.loads(line)["text"]
            except json.JSONDecodeError:
                raise UserError(f"{jsonl}:{number}: the line is damaged or cut short; {remedy}") from None
            yield text


def _write(
    source: Source, files: dict[Split, TextIO], valid_fraction: float | None
) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Write every document to its split; (documents and bytes per split, documents dropped by reason)."""
    splits: dict[str, dict[str, Any]] = {name: {"documents": 0, "bytes": 0} for name in SPLITS}
    dropped = {"empty": 0, "duplicates": 0}
    held_out: set[bytes] = set()  # only a publisher's split can hold a document twice: equal text hashes equally
    for published, text in source.documents:
        if not text or text.isspace():
            dropped["empty"] += 1
            continue
        split = published or split_of(text, valid_fraction or 0.0)
        raw = text.encode("utf-8")
        if published is not None:
            identity = hashlib.sha256(raw).digest()
            if split == "valid":
                assert splits["train"]["documents"] == 0, "a source yields its valid documents first"
                held_out.add(identity)
            elif identity in held_out:
                dropped["duplicates"] += 1
                continue
        files[split].write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        splits[split]["documents"] += 1
        splits[split]["bytes"] += len(raw)
    return splits, dropped


def _refuse_empty(splits: dict[str, dict[str, Any]], job: CorpusJob) -> None:
    counts = {name: split["documents"] for name, split in splits.items()}
    for name, count in counts.items():
        if count == 0:
            remedy = "raise" if name == "valid" else "lower"
            raise UserError(
                f"the corpus is too small: its {sum(counts.values())} documents leave the {name} split empty at "
                f"data.valid_fraction {job.data.valid_fraction}; add documents, or {remedy} data.valid_fraction"
            )
