import math
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from writing import data_config

from tapernorm.util.errors import UserError
from tapernorm_lab.config.jobs import CorpusJob
from tapernorm_lab.data import sources as module
from tapernorm_lab.data.corpus import build_corpus, read_documents
from tapernorm_lab.data.sources import open_source

COUNTS = (1500, 700, 2300)
TEXTS = [f"Document {i}." for i in range(sum(COUNTS))]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def parquet(path: Path, texts: list[str | None], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({field: pyarrow.array(texts, pyarrow.string())}), path)
    return path


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """The texts in order over files whose names are in the alphabet's order."""
    ends = np.cumsum(COUNTS)
    return [
        parquet(tmp_path / f"owt/train-{i}.parquet", TEXTS[end - count : end])
        for i, (count, end) in enumerate(zip(COUNTS, ends, strict=True))
    ]


def documents_of(*files: Path) -> list[tuple[str | None, str]]:
    return list(open_source(data_config("openwebtext", files=tuple(map(str, files)))).documents())


def nanogpt_split(texts: list[str], seed: int = 2357) -> list[tuple[str, str]]:
    """The permutation that the split is made of: its head is validation, the rest training."""
    order = np.random.default_rng(seed).permutation(len(texts))
    held_out = math.ceil(len(texts) * 0.0005)
    return [("valid" if place < held_out else "train", texts[row]) for place, row in enumerate(order)]


def test_the_split_is_the_predecessors_and_comes_in_its_order(shards: list[Path]) -> None:
    found = documents_of(*shards)
    assert found == nanogpt_split(TEXTS)
    assert [split for split, _ in found].count("valid") == 3
    own = datasets.Dataset.from_dict({"text": TEXTS}).train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    assert found == [*(("valid", text) for text in own["test"]["text"]), *(("train", t) for t in own["train"]["text"])]
    assert found != nanogpt_split(TEXTS, seed=2358)  # control


def test_a_folder_is_its_files_in_order_and_another_order_is_another_split(shards: list[Path]) -> None:
    found = documents_of(*shards)
    assert documents_of(shards[0].parent) == found
    assert documents_of(*reversed(shards)) != found  # control: the order is kept, so it matters


def test_a_corpus_takes_the_first_training_documents_and_all_validation(shards: list[Path], tmp_path: Path) -> None:
    data = data_config("openwebtext", files=(str(shards[0].parent),), max_train_documents=100)
    manifest = build_corpus(CorpusJob(data=(data,)), tmp_path / "out")
    split = nanogpt_split(TEXTS)
    assert list(read_documents(tmp_path / "out/valid.jsonl")) == [text for name, text in split if name == "valid"]
    assert list(read_documents(tmp_path / "out/train.jsonl")) == [text for name, text in split if name == "train"][:100]
    details = manifest["sources"][0]["details"]
    assert details["split"] == {"valid_share": 0.0005, "seed": 2357, "documents": len(TEXTS)}
    assert [Path(file["path"]).name for file in details["files"]] == [path.name for path in shards]


def test_a_null_is_an_empty_document(tmp_path: Path) -> None:
    found = documents_of(parquet(tmp_path / "a.parquet", ["a", None, "b", None]))
    assert sorted(text for _, text in found) == ["", "", "a", "b"]


def test_the_hub_is_asked_for_data_alone_and_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, **options: object) -> datasets.Dataset:
        asked.append((name, options))
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match=f"has {len(TEXTS)} documents and the whole data set 8013769: .* data.files"):
        open_source(data_config("openwebtext"))
    monkeypatch.setattr(module, "OWT_DOCUMENTS", len(TEXTS))
    source = open_source(data_config("openwebtext"))
    assert list(source.documents()) == nanogpt_split(TEXTS)
    assert source.details["hub"] == "Skylion007/openwebtext"
    expected = ("Skylion007/openwebtext", {"split": "train", "revision": "refs/convert/parquet", "streaming": False})
    assert asked == [expected, expected]


def test_no_network_says_how_to_use_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError) as raised:
        open_source(data_config("openwebtext"))
    assert all(
        word in str(raised.value) for word in ("Skylion007/openwebtext", "Couldn't reach", "folder in data.files")
    )


def test_files_that_are_no_such_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 rows with columns text; .* at least two"):
        documents_of(parquet(tmp_path / "one.parquet", ["a"]))
    with pytest.raises(UserError, match=r"columns body; .* a column 'text'"):
        documents_of(parquet(tmp_path / "other.parquet", ["a", "b"], field="body"))
    (tmp_path / "broken.parquet").write_text("no Parquet")
    with pytest.raises(UserError, match=r"broken.parquet is not a Parquet file"):
        documents_of(tmp_path / "broken.parquet")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"a.txt is not a .parquet file"):
        documents_of(tmp_path / "a.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="matches no file"):
        documents_of(tmp_path / "empty")


def test_a_damaged_shard_is_named_with_its_row(shards: list[Path]) -> None:
    column = pyarrow.parquet.read_metadata(shards[1]).row_group(0).column(0)
    raw = bytearray(shards[1].read_bytes())
    raw[column.data_page_offset] ^= 0xFF
    shards[1].write_bytes(raw)
    with pytest.raises(UserError, match=r"train-1.parquet is damaged between row 0 and"):
        documents_of(*shards)
