"""A corpus on disk: train.jsonl and valid.jsonl, disjoint, one document a line, with a manifest.

It holds one or more sources, one after the other. A document's split is its publisher's where there is one; elsewhere
it is a pure function of its own text, so that no document moves when others are added. A larger `valid_fraction` only
moves documents from train to valid; at 1 all are valid, and train.jsonl is empty.
"""

import hashlib
import json
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO, get_args

from ..errors import UserError
from ..files import parse_json, sha256_of, whole_file, write_json
from ..identity import digest
from ..jobs import CorpusJob
from ..provenance import provenance
from ..settings import DataConfig
from .manifest import SCHEMA_VERSION
from .sources import Source, Split, open_source

SPLITS: tuple[Split, ...] = get_args(Split)


def split_of(text: str, valid_fraction: float) -> Split:
    """`valid` where the first 64 bits of the text's sha256, read as a number in [0, 1), lie below `valid_fraction`."""
    head = hashlib.sha256(text.encode("utf-8")).digest()[:8]
    return "valid" if int.from_bytes(head, "big") < valid_fraction * 2.0**64 else "train"


def build_corpus(job: CorpusJob, out: Path) -> dict[str, Any]:
    """Write the corpus of `job` into `out`; returns its manifest.

    Documents without a visible character are dropped, and so are training documents that validation also holds, of
    whichever source; both are counted. Memory does not grow with the training split: the sources are read once for
    validation and once more for training.

    Raises:
        UserError: a source cannot be read, or a split would be empty. Nothing half-written is left.
    """
    sources = [(data, open_source(data)) for data in job.data]
    held_out: set[bytes] = set()
    with (
        whole_file(out / "manifest.json") as manifest_file,
        whole_file(out / "train.jsonl") as train_file,
        whole_file(out / "valid.jsonl") as valid_file,
    ):
        counts = []
        files: dict[Split, Path] = {"valid": valid_file, "train": train_file}
        for split, path in files.items():
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                counts += [_write(data, source, split, file, held_out) for data, source in sources]
        splits: dict[str, dict[str, Any]] = {
            split: {unit: sum(c[unit] for c in counts if c["split"] == split) for unit in ("documents", "bytes")}
            for split in SPLITS
        }
        _refuse_empty({split: entry["documents"] for split, entry in splits.items()}, job.data)
        splits["train"]["sha256"] = sha256_of(train_file)
        splits["valid"]["sha256"] = sha256_of(valid_file)
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "kind": "corpus",
            "splits": splits,
            "dropped": {reason: sum(c[reason] for c in counts) for reason in ("empty", "duplicates")},
            "sources": [
                {
                    "source": data.source,
                    "documents": {"train": train["documents"], "valid": valid["documents"]},
                    "details": source.details,
                }
                for (data, source), valid, train in zip(
                    sources, counts[: len(sources)], counts[len(sources) :], strict=True
                )
            ],
            "provenance": provenance(config_hash=digest(job)),
        }
        write_json(manifest_file, manifest)
    return manifest


def read_documents(jsonl: Path) -> Iterator[str]:
    """Documents of one split in order, one in memory at a time.

    Raises:
        UserError: there is no such file, or it is damaged (with the line).
    """
    remedy = f"make it with `tapernorm corpus --out {jsonl.parent} …`"
    if not jsonl.is_file():
        raise UserError(f"no corpus file {jsonl}; {remedy}")
    with open(jsonl, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = parse_json(line.decode("utf-8"))["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise UserError(f"{jsonl}:{number}: the line is damaged or cut short; {remedy}")
            yield text


def _write(data: DataConfig, source: Source, split: Split, file: TextIO, held_out: set[bytes]) -> dict[str, Any]:
    """Write what one source has of one split; counts of what was written and dropped.

    The hash of every validation document goes into `held_out`, and a training document whose hash is there is dropped.
    """
    counts = {"split": split, "documents": 0, "bytes": 0, "empty": 0, "duplicates": 0}
    limit = data.max_train_documents if split == "train" else None
    for text in _of_split(data, source, split):
        if not text or text.isspace():
            counts["empty"] += 1
            continue
        if counts["documents"] == limit:
            break
        raw = text.encode("utf-8")
        identity = hashlib.sha256(raw).digest()
        if split == "valid":
            held_out.add(identity)
        elif identity in held_out:
            counts["duplicates"] += 1
            continue
        file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        counts["documents"] += 1
        counts["bytes"] += len(raw)
    return counts


def _of_split(data: DataConfig, source: Source, split: Split) -> Iterator[str]:
    """The documents that one source has of one split, in order."""
    fraction = data.valid_fraction
    if fraction is not None:
        return (text for _, text in source.documents() if split_of(text, fraction) == split)
    published = source.documents()
    if split == "valid":  # they come first: no training document is read to find them
        published = takewhile(lambda document: document[0] == "valid", published)
    return (text for its_split, text in published if its_split == split)


def _refuse_empty(documents: dict[str, int], sources: tuple[DataConfig, ...]) -> None:
    for split, count in documents.items():
        all_valid = all(data.valid_fraction == 1 for data in sources)
        if count == 0 and not (split == "train" and all_valid):
            fractions = ", ".join(str(data.valid_fraction) for data in sources)
            remedy = "raise" if split == "valid" else "lower"
            raise UserError(
                f"the corpus is too small: its {sum(documents.values())} documents leave the {split} split empty at "
                f"data.valid_fraction {fractions}; add documents, or {remedy} data.valid_fraction"
            )
