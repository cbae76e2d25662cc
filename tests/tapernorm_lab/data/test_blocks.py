import hashlib
import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from writing import corpus_with

from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest
from tapernorm_lab.config.jobs import BlocksJob
from tapernorm_lab.data import blocks as module
from tapernorm_lab.data import token_stream as tokens_module
from tapernorm_lab.data.blocks import Blocks, batch_of, write_blocks
from tapernorm_lab.data.corpus import read_documents
from tapernorm_lab.data.tokenizers import open_tokenizer


class ByteTokenizer:
    """A stand-in without training: bytes, and a vocabulary of any size above them."""

    def __init__(self, vocab_size: int = 257) -> None:
        self.vocab_size, self.eod = vocab_size, vocab_size - 1
        self.manifest = {"sha256": "b" * 64}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


def job(context: int = 5, block_documents: int | None = None, max_rows: int | None = None) -> BlocksJob:
    return BlocksJob(context=context, block_documents=block_documents, max_rows=max_rows)


def cut(documents: list[list[int]], eod: int, context: int, group: int | None) -> list[list[int]]:
    """The predecessors' recipe: map over batches of documents, concatenate, cut, drop the rest."""
    rows = []
    for start in range(0, len(documents), group or len(documents)):
        ids = [i for document in documents[start : start + (group or len(documents))] for i in [*document, eod]]
        rows += [ids[at : at + context] for at in range(0, len(ids) - context + 1, context)]
    return rows


def rows_of(folder: Path, split: str) -> list[list[int]]:
    return Blocks.open(folder, split).rows.to(torch.int64).tolist()


@pytest.fixture
def stand_in(monkeypatch):
    coder = ByteTokenizer()
    monkeypatch.setattr(module, "open_tokenizer", lambda _: coder)
    return coder


# --- writing ---


@pytest.mark.parametrize("group", [None, 1, 7, 512])
@pytest.mark.parametrize("characters", [1, 1 << 18])
def test_rows_are_groups_of_documents_laid_end_to_end_and_cut(
    web_corpus, web_tokenizer, tmp_path, group, characters, monkeypatch
):
    monkeypatch.setattr(tokens_module, "_BATCH_CHARACTERS", characters)
    write_blocks(job(48, group, max_rows=None), web_corpus, web_tokenizer, tmp_path)
    coder = open_tokenizer(web_tokenizer)
    encoded = {
        split: [coder.encode(text) for text in read_documents(web_corpus / f"{split}.jsonl")]
        for split in ("train", "valid")
    }
    for split, documents in encoded.items():
        assert rows_of(tmp_path, split) == cut(documents, coder.eod, 48, group)
    if group == 7:  # control: other groups drop other tokens
        assert rows_of(tmp_path, "train") != cut(encoded["train"], coder.eod, 48, 8)


def test_the_manifest_is_the_contract(web_corpus, web_tokenizer, tmp_path):
    chosen = job(64, 512)
    manifest = write_blocks(chosen, web_corpus, web_tokenizer, tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest
    corpus = json.loads((web_corpus / "manifest.json").read_text())["splits"]
    coder = open_tokenizer(web_tokenizer)
    expected = {"schema_version": 1, "kind": "blocks", "dtype": "uint16", "vocab_size": 1024, "eod": coder.eod}
    expected |= {"context": 64, "block_documents": 512, "tokenizer_sha256": coder.manifest["sha256"]}
    assert {key: manifest[key] for key in expected} == expected
    for split, entry in manifest["splits"].items():
        raw = (tmp_path / f"{split}.bin").read_bytes()
        assert entry["sha256"] == hashlib.sha256(raw).hexdigest()
        assert entry["rows"] * 64 * 2 == len(raw)
        assert entry["documents"] == corpus[split]["documents"]
        tokens = sum(len(coder.encode(text)) + 1 for text in read_documents(web_corpus / f"{split}.jsonl"))
        assert entry["tokens_dropped"] == tokens - entry["rows"] * 64
        assert manifest["details"]["corpus_sha256"][split] == corpus[split]["sha256"]
    assert manifest["provenance"]["config_hash"] == digest(chosen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "train.bin", "valid.bin"]


def test_max_rows_draws_from_all_of_validation_alone(web_corpus, web_tokenizer, tmp_path):
    whole = write_blocks(job(64), web_corpus, web_tokenizer, tmp_path / "all")["splits"]["valid"]
    entry = write_blocks(job(64, max_rows=150), web_corpus, web_tokenizer, tmp_path / "few")["splits"]["valid"]
    assert (tmp_path / "few/train.bin").read_bytes() == (tmp_path / "all/train.bin").read_bytes()
    everything = [tuple(row) for row in rows_of(tmp_path / "all", "valid")]
    places = [everything.index(tuple(row)) for row in rows_of(tmp_path / "few", "valid")]
    assert len(places) == entry["rows"] == 150
    assert places == sorted(set(places))  # each once, in order
    assert places[0] < len(everything) // 10
    assert places[-1] > 9 * len(everything) // 10  # and not the first ones
    assert (entry["drawn_from"], entry["documents"]) == (whole["rows"], whole["documents"])
    again = write_blocks(job(64, max_rows=150), web_corpus, web_tokenizer, tmp_path / "again")["splits"]["valid"]
    assert again["sha256"] == entry["sha256"]
    write_blocks(job(64, max_rows=10**6), web_corpus, web_tokenizer, tmp_path / "more")
    assert rows_of(tmp_path / "more", "valid") == rows_of(tmp_path / "all", "valid")


def test_a_split_without_documents_is_left_out(stand_in, tmp_path):
    corpus = corpus_with(tmp_path / "corpus", valid=["some text"])
    manifest = write_blocks(job(), corpus, tmp_path, tmp_path / "out")
    assert list(manifest["splits"]) == ["valid"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "valid.bin"]
    with pytest.raises(UserError, match="no split 'train'; it has valid"):
        Blocks.open(tmp_path / "out", "train")


def test_memory_does_not_grow_with_the_corpus(stand_in, tmp_path):
    peaks = []
    for count in (2_000, 8_000):
        corpus = corpus_with(tmp_path / f"{count}", train=["x" * 500] * count, valid=["y" * 99])
        tracemalloc.start()
        write_blocks(job(64), corpus, tmp_path, tmp_path / "out")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 8_000 * 500  # control: it is the stream that is small, not the text


# --- what is refused ---


def test_a_split_shorter_than_a_row_is_refused_and_leaves_nothing(stand_in, tmp_path):
    corpus = corpus_with(tmp_path / "corpus", train=["abcdefgh"], valid=["abc"])
    with pytest.raises(UserError, match=r"valid split has 4 tokens and not one row of gpt2.context 5"):
        write_blocks(job(5), corpus, tmp_path, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(UserError, match=r"train split has 9 tokens .* group of 1 documents"):
        write_blocks(job(10, block_documents=1), corpus, tmp_path, tmp_path / "out")
    write_blocks(job(4), corpus, tmp_path, tmp_path / "out")  # exactly one row fits


# --- batches ---


def numbered(count: int, context: int = 3, dtype: torch.dtype = torch.uint16) -> Blocks:
    """Rows that each hold their own number."""
    ids = torch.arange(count).repeat_interleave(context).view(count, context)
    return Blocks(ids.to(dtype), {}, {})


def drawn(blocks: Blocks, *, seed: int, steps: range, batch: int) -> list[int]:
    return torch.cat([batch_of(blocks, seed=seed, step=step, batch=batch) for step in steps])[:, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32])
def test_every_row_comes_once_in_each_pass(dtype):
    blocks = numbered(11, dtype=dtype)
    batch = batch_of(blocks, seed=1, step=0, batch=4)
    assert (batch.shape, batch.dtype) == ((4, 3), torch.int64)
    assert torch.equal(batch, batch[:, :1].expand(4, 3))  # whole rows
    rows = drawn(blocks, seed=1, steps=range(11), batch=4)  # four passes, and batches that hold two of them
    passes = [rows[i : i + 11] for i in range(0, 44, 11)]
    assert all(sorted(one) == list(range(11)) for one in passes)
    assert len({tuple(one) for one in passes}) == 4  # each in its own order
    assert passes[0] != list(range(11))


def test_a_batch_is_a_function_of_seed_and_step():
    blocks = numbered(50)
    forwards = [drawn(blocks, seed=2, steps=range(k, k + 1), batch=8) for k in range(20)]
    backwards = [drawn(blocks, seed=2, steps=range(k, k + 1), batch=8) for k in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert forwards[0] != drawn(blocks, seed=3, steps=range(1), batch=8)


def test_the_order_does_not_depend_on_the_batch():
    blocks = numbered(40)
    assert drawn(blocks, seed=5, steps=range(12), batch=10) == drawn(blocks, seed=5, steps=range(40), batch=3)
