import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused

from tapernorm.util.errors import UserError
from tapernorm_lab.data import token_stream as tokens_module
from tapernorm_lab.data.corpus import read_documents
from tapernorm_lab.data.sentencepiece import Tokenizer
from tapernorm_lab.data.token_stream import TokenStream, windows, write_tokens


def stream_of(ids: Sequence[int], folder: Path, dtype: str = "uint16") -> TokenStream:
    """A stream written by NumPy, opened by the library."""
    folder.mkdir(parents=True, exist_ok=True)
    np.asarray(ids, dtype=dtype).tofile(folder / "train.bin")
    manifest = {"schema_version": 1, "kind": "tokens", "dtype": dtype, "splits": {"train": {"tokens": len(ids)}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return TokenStream.open(folder, "train")


# --- writing ---


@pytest.mark.parametrize("split", ["train", "valid"])
def test_the_stream_is_every_document_and_an_end_after_each(web_corpus, web_tokenizer, web_tokens, split):
    coder = Tokenizer(web_tokenizer)
    ids = np.memmap(web_tokens / f"{split}.bin", dtype="<u2", mode="r")
    ends = np.flatnonzero(ids == coder.eod)
    assert ends[-1] == len(ids) - 1
    decoded = [coder.decode(part[:-1].tolist()) for part in np.split(ids, ends[:-1] + 1)]
    with open(web_corpus / f"{split}.jsonl", encoding="utf-8") as file:
        assert decoded == [json.loads(line)["text"] for line in file]
    assert not (ids == 0).any()  # no unknown id


def test_the_manifest_is_the_contract(web_corpus, web_tokenizer, web_tokens):
    manifest = json.loads((web_tokens / "manifest.json").read_text())
    corpus = json.loads((web_corpus / "manifest.json").read_text())
    coder = Tokenizer(web_tokenizer)
    assert {key: manifest[key] for key in ("schema_version", "kind", "dtype", "vocab_size", "eod")} == {
        "schema_version": 1,
        "kind": "tokens",
        "dtype": "uint16",
        "vocab_size": coder.vocab_size,
        "eod": coder.eod,
    }
    for split, entry in manifest["splits"].items():
        raw = (web_tokens / f"{split}.bin").read_bytes()
        texts = list(read_documents(web_corpus / f"{split}.jsonl"))
        assert entry == {
            "documents": len(texts),
            "tokens": len(raw) // 2,
            "bytes": sum(len(text.encode()) for text in texts),
            "sha256": hashlib.sha256(raw).hexdigest(),
        }
        assert manifest["corpus_sha256"][split] == corpus["splits"][split]["sha256"]
    assert manifest["tokenizer_sha256"] == hashlib.sha256((web_tokenizer / "tokenizer.model").read_bytes()).hexdigest()
    assert manifest["tokenizer_corpus_sha256"] == manifest["corpus_sha256"]
    assert "written_at" in manifest["provenance"]


class CharacterTokenizer:
    """A stand-in of any vocabulary size: one id a character, counted down from the top."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self.manifest = {"sha256": "0" * 64, "corpus_sha256": {}}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[self.eod - 1 - ord(character) % 5000 for character in text] for text in texts]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32"), (70_000, "uint32")])
def test_the_type_is_the_smallest_that_holds_the_vocabulary(web_corpus, tmp_path, monkeypatch, vocab_size, dtype):
    coder = CharacterTokenizer(vocab_size)
    monkeypatch.setattr(tokens_module, "Tokenizer", lambda _: coder)
    manifest = write_tokens(web_corpus, tmp_path, tmp_path / "out", context=8)
    assert manifest["dtype"] == dtype
    stream = TokenStream.open(tmp_path / "out", "valid")
    written = np.memmap(tmp_path / "out/valid.bin", dtype=dtype, mode="r")
    first = next(read_documents(web_corpus / "valid.jsonl"))
    assert written[: len(first) + 1].tolist() == [*coder.encode_batch([first])[0], vocab_size - 1]
    assert stream.tokens.to(torch.int64).tolist() == written.tolist()


def test_a_split_shorter_than_a_window_is_refused_and_leaves_nothing(web_corpus, web_tokenizer, web_tokens, tmp_path):
    held_out = json.loads((web_tokens / "manifest.json").read_text())["splits"]["valid"]["tokens"]
    with refused(
        f"valid split has {held_out} tokens", f"takes {held_out + 1}", "data.valid_fraction", "lower model.context"
    ):
        write_tokens(web_corpus, web_tokenizer, tmp_path / "out", context=held_out)
    assert list((tmp_path / "out").iterdir()) == []
    write_tokens(web_corpus, web_tokenizer, tmp_path / "out", context=held_out - 1)  # exactly one window fits


def test_a_corpus_that_is_not_its_manifest_s_is_refused(web_corpus, web_tokenizer, tmp_path):
    folder = shutil.copytree(web_corpus, tmp_path / "corpus")
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(UserError, match=r"train.jsonl holds \d+ documents .* says \d+: it was cut short or replaced"):
        write_tokens(folder, web_tokenizer, tmp_path / "out", context=128)
    assert list((tmp_path / "out").iterdir()) == []


# --- opening ---


def test_the_mapping_never_writes_to_the_file(tmp_path):
    stream = stream_of(range(50), tmp_path)
    stream.tokens.zero_()
    assert np.fromfile(tmp_path / "train.bin", dtype=np.uint16).tolist() == list(range(50))


def test_a_file_that_is_not_the_manifest_s_size_is_refused(tmp_path):
    stream_of(range(50), tmp_path)
    path = tmp_path / "train.bin"
    for raw in (path.read_bytes()[:-2], path.read_bytes() + b"\0"):
        path.write_bytes(raw)
        with pytest.raises(UserError, match=rf"has {len(raw)} bytes.* manifest says 50 tokens of 2 bytes"):
            TokenStream.open(tmp_path, "train")
    path.unlink()
    with pytest.raises(UserError, match="has 0 bytes"):
        TokenStream.open(tmp_path, "train")


def test_an_unknown_split_or_schema_is_refused(tmp_path):
    stream_of(range(50), tmp_path)
    with pytest.raises(UserError, match="no split 'test'; it has train"):
        TokenStream.open(tmp_path, "test")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 2}))
    with pytest.raises(UserError, match="schema version 2"):
        TokenStream.open(tmp_path, "train")


# --- windows ---


def test_windows_are_rows_of_the_stream(web_tokens):
    stream = TokenStream.open(web_tokens, "train")
    ids = np.memmap(web_tokens / "train.bin", dtype="<u2", mode="r")
    rows = windows(stream, seed=3, step=5, batch=4, context=128)
    assert (rows.shape, rows.dtype) == ((4, 129), torch.int64)
    every = np.lib.stride_tricks.sliding_window_view(ids, 129)
    for row in rows.numpy():
        starts = np.flatnonzero(ids[: len(every)] == row[0])
        assert any((every[start] == row).all() for start in starts)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_ids_above_the_signed_range_come_through(tmp_path, dtype):
    top = np.iinfo(dtype).max
    stream = stream_of([top - i for i in range(20)], tmp_path, dtype)
    rows = windows(stream, seed=0, step=0, batch=8, context=10)
    assert torch.equal(rows[:, :-1] - 1, rows[:, 1:])
    assert top - 20 < rows.min() < rows.max() <= top


def test_windows_are_a_function_of_seed_and_step(tmp_path):
    stream = stream_of(range(5000), tmp_path)

    def starts(seed: int, step: int) -> tuple[int, ...]:
        return tuple(windows(stream, seed=seed, step=step, batch=4, context=16)[:, 0].tolist())

    in_order = [starts(seed, step) for seed in range(3) for step in range(20)]
    torch.manual_seed(7)  # the global generator has no say
    backwards = [starts(seed, step) for seed in reversed(range(3)) for step in reversed(range(20))]
    assert in_order == backwards[::-1]
    assert len(set(in_order)) == 60


def test_offsets_are_uniform_and_reach_the_last_window(tmp_path):
    stream = stream_of(range(12), tmp_path)  # context 4: eight windows, at 0..7
    draws = 4000
    rows = torch.cat([windows(stream, seed=1, step=step, batch=400, context=4) for step in range(draws // 400)])
    counts = Counter(rows[:, 0].tolist())
    assert set(counts) == set(range(8))
    assert rows.max() == 11
    chi_square = sum((count - draws / 8) ** 2 / (draws / 8) for count in counts.values())
    assert chi_square < 24.3  # 99.9 % point at 7 degrees of freedom


def test_a_stream_of_one_window_gives_it_and_a_shorter_one_is_refused(tmp_path):
    stream = stream_of(range(9), tmp_path)
    assert windows(stream, seed=0, step=0, batch=2, context=8).tolist() == [list(range(9))] * 2
    with pytest.raises(UserError, match=r"has 9 tokens.* takes 10 \(model.context 9"):
        windows(stream, seed=0, step=0, batch=2, context=9)
