import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from refusals import refused
from writing import parquet_with

from tapernorm.util.errors import UserError
from tapernorm_lab.config.jobs import HubRowsJob
from tapernorm_lab.data import hub_rows as module
from tapernorm_lab.data.blocks import Blocks
from tapernorm_lab.data.hub_rows import write_hub_rows

VOCABULARY = 50_257
ROWS = [[(7 * row + 11 * place) % VOCABULARY for place in range(6)] for row in range(700)]


class StandIn:
    def __init__(self) -> None:
        self.vocab_size, self.eod, self.manifest = VOCABULARY, VOCABULARY - 1, {"sha256": "c" * 64}


def job(name: str = "someone/rows", **changes: object) -> HubRowsJob:
    rows = {"name": name, "revision": None, "split": "train", "field": "input_ids"}
    chosen = {"context": 6, "max_rows": None} | {k: v for k, v in changes.items() if k not in rows}
    return HubRowsJob.model_validate({"rows": rows | {k: v for k, v in changes.items() if k in rows}} | chosen)


@pytest.fixture(autouse=True)
def tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(module, "open_tokenizer", lambda _: StandIn())


def folder_of(path: Path, rows: list[list[int] | None], field: str = "input_ids", pieces: int = 3) -> Path:
    size = -(-len(rows) // pieces)
    for i in range(pieces):
        column = pyarrow.array(rows[i * size : (i + 1) * size], pyarrow.list_(pyarrow.int64()))
        parquet_with(path / f"part-{i}.parquet", **{field: column})
    return path


def rows_in(folder: Path) -> list[list[int]]:
    return Blocks.open(folder, "valid").rows.to(torch.int64).tolist()


@pytest.mark.parametrize("max_rows", [None, 1, 256, 300, 5000])
def test_a_local_folder_stands_in_for_the_hub(tmp_path, max_rows):
    source = folder_of(tmp_path / "rows", ROWS)
    manifest = write_hub_rows(job(str(source), max_rows=max_rows), tmp_path, tmp_path / "out")
    assert rows_in(tmp_path / "out") == ROWS[:max_rows]
    assert json.loads((tmp_path / "out/manifest.json").read_text()) == manifest
    expected = {"kind": "blocks", "context": 6, "vocab_size": VOCABULARY, "eod": VOCABULARY - 1, "dtype": "uint16"}
    assert {key: manifest[key] for key in expected} == expected
    assert manifest["tokenizer_sha256"] == "c" * 64
    assert manifest["splits"]["valid"]["rows"] == len(ROWS[:max_rows])
    assert [Path(file["path"]).name for file in manifest["details"]["files"]] == [f"part-{i}.parquet" for i in range(3)]


def test_a_folder_has_no_revision(tmp_path):
    source = folder_of(tmp_path / "rows", ROWS[:5], pieces=1)
    with pytest.raises(UserError, match="is a local folder, which has no revision"):
        write_hub_rows(job(str(source), revision="abc"), tmp_path, tmp_path / "out")


def test_the_hub_is_streamed_where_the_first_rows_are_enough(tmp_path, monkeypatch):
    asked, read = [], []

    def rows() -> Iterator[dict[str, list[int]]]:
        for row in ROWS:
            read.append(1)
            yield {"input_ids": row}

    def load_dataset(name: str, **options: object) -> object:
        asked.append((name, options))
        if options["streaming"]:
            return datasets.IterableDataset.from_generator(rows)
        return datasets.Dataset.from_dict({"input_ids": ROWS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    manifest = write_hub_rows(job(max_rows=20, revision="abc"), tmp_path, tmp_path / "few")
    write_hub_rows(job(), tmp_path, tmp_path / "all")
    assert (rows_in(tmp_path / "few"), rows_in(tmp_path / "all")) == (ROWS[:20], ROWS)
    assert len(read) < 100  # the rest was not fetched
    assert asked == [
        ("someone/rows", {"split": "train", "revision": "abc", "streaming": True}),
        ("someone/rows", {"split": "train", "revision": None, "streaming": False}),
    ]
    assert manifest["details"] == {
        "hub": "someone/rows", "revision": "abc", "split": "train", "field": "input_ids", "max_rows": 20,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        ([*ROWS[:5], ROWS[5][:4]], {}, ["row 5 of", "has 4 tokens", "gpt2.context is 6"]),
        (ROWS[:5], {"context": 8}, ["row 0 of", "has 6 tokens", "gpt2.context is 8"]),
        ([*ROWS[:2], None], {}, ["row 2 of", "has 0 tokens"]),
        ([[1, 2, 3, 4, 5, VOCABULARY]], {}, ["ids from 1 to 50257", "50257 entries"]),
        ([[1, 2, 3, 4, 5, -1]], {}, ["ids from -1 to 5"]),
        (ROWS[:5], {"field": "tokens"}, ["no column 'tokens'", "'input_ids'"]),
    ],
)
@pytest.mark.parametrize("max_rows", [None, 50])
def test_rows_that_do_not_fit_are_refused_and_leave_nothing(tmp_path, rows, changes, words, max_rows):
    source = folder_of(tmp_path / "rows", rows, pieces=1)
    with refused(*words):
        write_hub_rows(job(str(source), max_rows=max_rows, **changes), tmp_path, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_data_set_without_rows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict({"input_ids": []}))
    with pytest.raises(UserError, match="has no row in split 'train'"):
        write_hub_rows(job(), tmp_path, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("late", [False, True])
def test_no_network_names_the_folder_alternative(tmp_path, monkeypatch, late):
    def rows() -> Iterator[dict[str, list[int]]]:
        yield {"input_ids": ROWS[0]}
        raise ConnectionError("Couldn't reach the Hub")

    def load_dataset(*_: object, **__: object) -> object:
        if late:  # only once rows are fetched
            return datasets.IterableDataset.from_generator(rows)
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match=r"cannot load someone/rows .*reach the Hub.* name their folder as rows.name"):
        write_hub_rows(job(max_rows=9), tmp_path, tmp_path / "out")
    assert not (tmp_path / "out/valid.bin").exists()


@pytest.mark.parametrize("max_rows", [None, 650])
def test_a_damaged_file_of_a_folder_is_named_with_its_row(tmp_path, max_rows):
    source = folder_of(tmp_path / "rows", ROWS)
    path = source / "part-1.parquet"
    column = pyarrow.parquet.read_metadata(path).row_group(0).column(0)
    raw = bytearray(path.read_bytes())
    raw[column.data_page_offset] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"part-1.parquet is damaged between row 0 and"):
        write_hub_rows(job(str(source), max_rows=max_rows), tmp_path, tmp_path / "out")
    assert not (tmp_path / "out/valid.bin").exists()


@pytest.mark.parametrize("column", [["a b c d"], [1.5], [[1.5] * 6], [["a"] * 6], [[None] * 6], [{"a": 1}]])
def test_a_column_without_ids_is_refused(tmp_path, monkeypatch, column):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict({"input_ids": column}))
    with pytest.raises(UserError, match=r"row 0 of someone/rows holds no list of token ids: .* rows.field"):
        write_hub_rows(job(), tmp_path, tmp_path / "out")
