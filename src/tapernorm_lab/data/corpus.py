"""A corpus on disk: disjoint train.jsonl and valid.jsonl, one document per line, with a manifest.

It holds one or more sources, one after the other. A document keeps its publisher's split if there is one. Otherwise
its split is a pure function of its text, so that no document moves when others are added. Documents are split by
passages if they are so few, such as a single book, that a split would be empty.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

from tapernorm.util.atomic_files import parse_json, sha256_of, write_json
from tapernorm.util.errors import UserError, setting
from tapernorm.util.hashing import digest

from ..config.jobs import CorpusJob
from ..config.sections import DataConfig
from .manifest import made_manifest, whole_files
from .passages import Layout, identity_of, least_characters
from .sources import Source, Split, open_source

SPLITS: tuple[Split, ...] = get_args(Split)


def split_of(text: str, valid_fraction: float) -> Split:
    """Return `valid` if the first 64 bits of the text's sha256, as a number in [0, 1), lie below `valid_fraction`."""
    head = hashlib.sha256(text.encode("utf-8")).digest()[:8]
    return "valid" if int.from_bytes(head, "big") < valid_fraction * 2.0**64 else "train"


class Reading:
    """The documents of a corpus by split, in the order of its sources.

    Blank documents are dropped, and so are training documents that validation holds. If the documents are so few that
    the hash leaves a split empty, they are split by `passages`.
    """

    def __init__(self, job: CorpusJob) -> None:
        """Open the sources, and read them until both splits have a document."""
        self.sources = [(data, open_source(data)) for data in job.data]
        self.dropped = {"empty": 0, "duplicates": 0}
        self._held_out: set[bytes] = set()
        self._layouts = [] if self._has_both_splits() else self._lay_out()

    def documents(self, split: Split) -> Iterator[tuple[int, str]]:
        """Yield (index of the source, text) of one split.

        Read `valid` before `train`: training leaves out the documents that validation holds.
        """
        for place, (data, source) in enumerate(self.sources):
            limit = data.max_train_documents if split == "train" else None
            taken, last = 0, None
            for number, whole, text in self._of_split(data, source, split):
                if not text or text.isspace():
                    self.dropped["empty"] += 1
                    continue
                if number != last and taken == limit:
                    break
                if split == "valid":
                    self._held_out.add(identity_of(text))
                elif not self._held_out.isdisjoint(identity_of(part) for part in {text, whole}):
                    self.dropped["duplicates"] += 1
                    continue
                taken, last = taken + (number != last), number
                yield place, text

    @property
    def passages(self) -> dict[str, Any] | None:
        """Number, characters and sha256 of the distinct documents that are split by passages; None without any."""
        if not self._layouts:
            return None
        identities = [identity.hex() for layout in self._layouts for identity in layout.starts]
        characters = sum(layout.characters for layout in self._layouts)
        return {"documents": len(identities), "characters": characters, "sha256": identities}

    def refuse_empty(self, documents: Mapping[Split, int]) -> None:
        """Check that each wanted split has a document; a corpus that is only scored needs no training split.

        Raises:
            UserError: a wanted split is empty.
        """
        fractions = [data.valid_fraction for data, _ in self.sources]
        wanted = {"valid": True, "train": any(fraction != 1 for fraction in fractions)}
        for split in (split for split in SPLITS if wanted[split] and not documents[split]):
            count = sum(documents.values())
            if (parted := [fraction for fraction in fractions if fraction not in (None, 1)]) == []:
                raise UserError(
                    f"the corpus is too small: the {split} split of its sources has no document of its own; "
                    f"choose another {setting('data.source')}"
                )
            key, remedy = setting("data.valid_fraction"), "raise" if split == "valid" else "lower"
            raise UserError(
                f"the corpus is too small: its {count} documents leave the {split} split empty at {key} "
                f"{', '.join(map(str, parted))}. A split by passages needs "
                f"{min(map(least_characters, parted)):,} characters: add text, or {remedy} {key}"
            )

    def _of_split(self, data: DataConfig, source: Source, split: Split) -> Iterator[tuple[int, str, str]]:
        """Yield (number of the document, its whole text, its text in this split), in order."""
        fraction = data.valid_fraction
        published = source.documents()
        if fraction is None and split == "valid":  # validation documents come first, so stop at the first training one
            published = takewhile(lambda document: document[0] == "valid", published)
        for number, (its_split, whole) in enumerate(published):
            pieces = [(its_split if fraction is None else split_of(whole, fraction), whole)]
            if fraction not in (None, 1):
                layouts = (layout.passages(whole) for layout in self._layouts if identity_of(whole) in layout.starts)
                pieces = next(layouts, pieces)
            yield from ((number, whole, text) for part, text in pieces if part == split)

    def _has_both_splits(self) -> bool:
        """Whether the hash gives both splits a document; reading stops as soon as that is known."""
        if all(data.valid_fraction in (None, 1) for data, _ in self.sources):
            return True
        found: set[Split | None] = set()
        for data, source in self.sources:
            for its_split, text in source.documents():
                if text and not text.isspace():
                    found.add(its_split if data.valid_fraction is None else split_of(text, data.valid_fraction))
                if found >= set(SPLITS):
                    return True
                if data.valid_fraction == 1 and "valid" in found:  # all further documents are in valid too
                    break
        return False

    def _lay_out(self) -> list[Layout]:
        layouts: list[Layout] = []
        for data, source in self.sources:
            if data.valid_fraction not in (None, 1):
                others = {identity for layout in layouts for identity in layout.starts}
                texts = (text for _, text in source.documents())
                layouts.append(Layout.of(texts, data.valid_fraction, others=others))
        return [layout for layout in layouts if layout.characters >= least_characters(layout.fraction)]


def build_corpus(job: CorpusJob, out: Path) -> dict[str, Any]:
    """Write the corpus of `job` into `out`, and return its manifest.

    Documents without a visible character are dropped, and so are training documents that validation holds, from any
    source. Both are counted. The sources are read once for validation and once more for training.

    Raises:
        UserError: a source cannot be read, or a split would be empty.
    """
    reading = Reading(job)
    with whole_files(out, "valid.jsonl", "train.jsonl") as files:
        # Validation first, because training leaves out the documents that validation holds.
        counts = {s: _write(files[f"{s}.jsonl"], reading.documents(s), len(job.data)) for s in reversed(SPLITS)}
        splits: dict[Split, dict[str, Any]] = {
            split: {unit: sum(count[unit] for count in counts[split]) for unit in ("documents", "bytes")}
            for split in SPLITS
        }
        reading.refuse_empty({split: splits[split]["documents"] for split in SPLITS})
        for split in SPLITS:
            splits[split]["sha256"] = sha256_of(files[f"{split}.jsonl"])
        sources = [
            {
                "source": data.source,
                "documents": {split: counts[split][place]["documents"] for split in SPLITS},
                "details": source.details,
            }
            for place, (data, source) in enumerate(reading.sources)
        ]
        passages = {} if reading.passages is None else {"passages": reading.passages}
        manifest = made_manifest(
            "corpus", config_hash=digest(job), splits=splits, dropped=reading.dropped, sources=sources, **passages
        )
        write_json(files["manifest.json"], manifest)
    if reading.passages is not None:
        print(told_of(splits, reading.passages), file=sys.stderr)
    return manifest


def told_of(splits: Mapping[Split, Mapping[str, Any]], passages: Mapping[str, Any]) -> str:
    """Describe in one line a corpus that is split by passages, from its `splits` and `Reading.passages`."""
    count = passages["documents"]
    few = "the text is one document" if count == 1 else f"the text is {count} documents, too few to hold one out"
    share = splits["valid"]["bytes"] / sum(splits[split]["bytes"] for split in SPLITS)
    return (
        f"{few}: validation takes {splits['valid']['documents']} of its passages ({share:.1%} of the text), training "
        f"the {splits['train']['documents']} around them"
    )


def read_documents(jsonl: Path) -> Iterator[str]:
    """Yield the documents of one split in order, with one in memory at a time.

    Raises:
        UserError: the file is missing, or a line of it is damaged.
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


def _write(path: Path, documents: Iterable[tuple[int, str]], sources: int) -> list[dict[str, int]]:
    """Write one split, and return the documents and bytes of each source in it."""
    counts = [{"documents": 0, "bytes": 0} for _ in range(sources)]
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for place, text in documents:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            counts[place]["documents"] += 1
            counts[place]["bytes"] += len(text.encode("utf-8"))
    return counts
