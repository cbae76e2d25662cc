import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tapernorm.util.errors import UserError
from tapernorm_lab.config.jobs import FilterJob
from tapernorm_lab.data import filter_rows as module
from tapernorm_lab.data.blocks import Blocks
from tapernorm_lab.data.filter_rows import filter_rows

VOCABULARY = 40
ALL = FilterJob(seen_rows=None)


def blocks(folder: Path, *, dtype: str = "uint16", tokenizer: str = "t", **splits: np.ndarray) -> Path:
    """A folder of blocks written by NumPy."""
    folder.mkdir(parents=True)
    entries = {}
    for split, rows in splits.items():
        raw = rows.astype(dtype).tobytes()
        (folder / f"{split}.bin").write_bytes(raw)
        entries[split] = {"rows": len(rows), "sha256": hashlib.sha256(raw).hexdigest()}
        context = rows.shape[1]
    manifest = {"schema_version": 1, "kind": "blocks", "dtype": dtype, "vocab_size": VOCABULARY, "context": context}
    manifest |= {"block_documents": 3, "eod": 0, "tokenizer_sha256": tokenizer * 64, "splits": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def rows_in(folder: Path) -> np.ndarray:
    return Blocks.open(folder, "valid").rows.to(torch.int64).numpy()


@pytest.fixture
def texts():
    """(rows to filter, seen rows), of other lengths; of the ids 30 .. 39 half occur in what was seen."""
    random = np.random.default_rng(3)
    weights = np.where(np.arange(VOCABULARY) < 30, 1.0, 0.15)
    rows = random.choice(VOCABULARY, size=(200, 7), p=weights / weights.sum())
    return rows, np.concatenate([np.arange(30), [31, 33, 35, 37, 39], [0, 0, 0, 0, 0]]).reshape(-1, 4)


def kept_by_hand(rows: np.ndarray, seen: np.ndarray) -> list[list[int]]:
    known = set(seen.flatten().tolist())
    return [row for row in rows.tolist() if known.issuperset(row)]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("ids", [1, 30, 1 << 22])
def test_a_row_stays_if_every_token_was_seen(texts, tmp_path, monkeypatch, dtype, ids):
    monkeypatch.setattr(module, "_IDS", ids)  # in chunks of one row, a few, all
    rows, seen = texts
    source = blocks(tmp_path / "rows", dtype=dtype, valid=rows)
    manifest = filter_rows(ALL, source, blocks(tmp_path / "seen", train=seen), tmp_path / "out")
    expected = kept_by_hand(rows, seen)
    assert rows_in(tmp_path / "out").tolist() == expected
    assert 0.2 < len(expected) / len(rows) < 0.9
    details = manifest["details"]
    assert (details["rows"], details["kept"], details["dropped"]) == (200, len(expected), 200 - len(expected))


def test_only_the_training_split_of_the_other_text_counts(texts, tmp_path):
    rows, seen = texts
    everything = np.arange(VOCABULARY).reshape(-1, 4)
    source = blocks(tmp_path / "rows", valid=rows, train=everything.repeat(2, 1)[:, :7])
    filter_rows(ALL, source, blocks(tmp_path / "seen", train=seen, valid=everything), tmp_path / "out")
    assert rows_in(tmp_path / "out").tolist() == kept_by_hand(rows, seen) != rows.tolist()
    filter_rows(ALL, source, blocks(tmp_path / "more", train=everything), tmp_path / "all")
    assert rows_in(tmp_path / "all").tolist() == rows.tolist()  # control: what was seen decides


def test_the_manifest_says_what_dropped_the_rows(texts, tmp_path):
    rows, seen = texts
    rows = np.concatenate([rows, np.full((1, 7), 30)])  # one row, however often it holds the token
    source, other = blocks(tmp_path / "rows", valid=rows), blocks(tmp_path / "seen", train=seen)
    manifest = filter_rows(ALL, source, other, tmp_path / "out")
    assert json.loads((tmp_path / "out/manifest.json").read_text()) == manifest
    by_token = {i: int((rows == i).any(1).sum()) for i in range(VOCABULARY) if i not in seen}
    named = manifest["details"]["unseen"]
    assert named["tokens"] == len(by_token) == 5
    assert {entry["id"]: entry["rows"] for entry in named["most"]} == by_token
    assert [e["rows"] for e in named["most"]] == sorted(by_token.values(), reverse=True)
    assert manifest["kind"] == "blocks"
    assert list(manifest["splits"]) == ["valid"]
    assert manifest["details"]["seen"] == {
        "rows": len(seen), "of": len(seen), "sha256": hashlib.sha256((other / "train.bin").read_bytes()).hexdigest(),
    }  # fmt: skip
    assert manifest["details"]["of_sha256"] == hashlib.sha256((source / "valid.bin").read_bytes()).hexdigest()
    assert (
        manifest["splits"]["valid"]["sha256"] == hashlib.sha256((tmp_path / "out/valid.bin").read_bytes()).hexdigest()
    )
    assert (manifest["context"], manifest["block_documents"], manifest["tokenizer_sha256"]) == (7, 3, "t" * 64)


def test_a_drawn_sample_is_fixed_and_spread_over_the_text(tmp_path):
    seen = np.arange(VOCABULARY).reshape(-1, 1).repeat(5, 1)  # row i holds i alone
    source = blocks(tmp_path / "rows", valid=np.arange(VOCABULARY).reshape(-1, 1))
    other = blocks(tmp_path / "seen", train=seen)
    drawn = []
    for count in (10, 20, VOCABULARY):
        out = tmp_path / str(count)
        manifest = filter_rows(FilterJob(seen_rows=count), source, other, out)
        drawn.append(rows_in(out).flatten().tolist())
        assert len(drawn[-1]) == count  # without replacement
        assert manifest["details"]["seen"]["rows"] == count
        filter_rows(FilterJob(seen_rows=count), source, other, tmp_path / f"{count} again")
        assert rows_in(tmp_path / f"{count} again").flatten().tolist() == drawn[-1]
    assert set(drawn[0]) < set(drawn[1]) < set(drawn[2])  # a larger sample holds the smaller one
    assert drawn[0] != list(range(10))


# --- what is refused ---


def test_rows_of_another_tokenizer_are_refused(texts, tmp_path):
    rows, seen = texts
    source = blocks(tmp_path / "rows", valid=rows)
    other = blocks(tmp_path / "seen", tokenizer="u", train=seen)
    with pytest.raises(UserError, match=r"with the tokenizer tttttttttttttttt and .* with uuuuuuuuuuuuuuuu"):
        filter_rows(ALL, source, other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_filter_that_leaves_nothing_is_refused(tmp_path):
    source = blocks(tmp_path / "rows", valid=np.full((3, 4), 8))
    other = blocks(tmp_path / "seen", train=np.full((5, 4), 9))
    with pytest.raises(UserError, match=r"3 rows .* seen_rows"):
        filter_rows(ALL, source, other, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_sample_larger_than_the_text_is_refused(tmp_path):
    source = blocks(tmp_path / "rows", valid=np.full((3, 4), 9))
    other = blocks(tmp_path / "seen", train=np.full((5, 4), 9))
    with pytest.raises(UserError, match=r"seen_rows is 6.* 5 rows"):
        filter_rows(FilterJob(seen_rows=6), source, other, tmp_path / "out")
