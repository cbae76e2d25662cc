import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapernorm.config import CorpusJob, DataConfig, digest
from tapernorm.data import corpora
from tapernorm.data.corpora import SPLITS, build_corpus, read_documents, split_of
from tapernorm.data.sources import Source, Split
from tapernorm.errors import UserError


def text_job(*files: Path, valid_fraction: float = 0.3) -> CorpusJob:
    names = tuple(str(file) for file in files)
    return CorpusJob(data=DataConfig(source="text", files=names, field="text", valid_fraction=valid_fraction))


def jsonl_with(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def documents_in(folder: Path) -> dict[str, list[str]]:
    return {split: list(read_documents(folder / f"{split}.jsonl")) for split in SPLITS}


def published(monkeypatch: pytest.MonkeyPatch, rows: list[tuple[Split, str]]) -> CorpusJob:
    """A job whose source yields `rows` in their publisher's splits."""
    monkeypatch.setattr(corpora, "open_source", lambda _: Source(iter(rows), {"hub": "a/b"}))
    return CorpusJob(data=DataConfig(source="tinystories", files=(), field=None, valid_fraction=None))


# --- the split ---


@given(text=st.text(st.characters(exclude_categories=["Cs"])), low=st.floats(0, 1), high=st.floats(0, 1))
def test_the_split_is_the_sha256_of_the_text(text: str, low: float, high: float) -> None:
    low, high = sorted((low, high))
    share = int(hashlib.sha256(text.encode()).hexdigest(), 16) / 2**256
    if abs(share - high) > 1e-12:
        assert split_of(text, high) == ("valid" if share < high else "train")
    assert (split_of(text, low), split_of(text, high)) != ("valid", "train")  # a larger share only moves to valid


def test_the_valid_share_is_the_fraction() -> None:
    n, fraction = 20_000, 0.1
    held_out = sum(split_of(f"document {i}", fraction) == "valid" for i in range(n))
    assert abs(held_out - n * fraction) < 5 * (n * fraction * (1 - fraction)) ** 0.5


def test_documents_do_not_move_when_others_are_added(tmp_path: Path) -> None:
    texts = [f"Story {i}.\n" for i in range(60)]
    few = jsonl_with(tmp_path / "few.jsonl", texts[:40])
    more = jsonl_with(tmp_path / "more.jsonl", texts[40:])
    build_corpus(text_job(few), tmp_path / "a")
    build_corpus(text_job(more, few), tmp_path / "b")
    before, after = documents_in(tmp_path / "a"), documents_in(tmp_path / "b")
    for split in SPLITS:
        assert [text for text in after[split] if text in texts[:40]] == before[split]
        assert len(after[split]) > len(before[split])


# --- what is written ---


def test_every_document_lands_in_one_split_untouched_and_in_order(tmp_path: Path) -> None:
    texts = [f"{i}\t <|endoftext|> é😀\u2028\x85\x00\r\n  " for i in range(50)]
    build_corpus(text_job(jsonl_with(tmp_path / "a.jsonl", texts)), tmp_path / "out")
    written = documents_in(tmp_path / "out")
    assert written == {split: [text for text in texts if split_of(text, 0.3) == split] for split in SPLITS}
    assert all(written.values())


def test_the_manifest_counts_what_the_files_hold(tmp_path: Path) -> None:
    texts = [f"é {i}" for i in range(30)] + ["", " \n\t\u3000", "\n"]
    source = jsonl_with(tmp_path / "a.jsonl", texts)
    job = text_job(source)
    manifest = build_corpus(job, tmp_path / "out")
    assert json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8")) == manifest
    assert (manifest["schema_version"], manifest["kind"], manifest["source"]) == (1, "corpus", "text")
    for split, documents in documents_in(tmp_path / "out").items():
        assert manifest["splits"][split] == {
            "documents": len(documents),
            "bytes": sum(len(text.encode()) for text in documents),
            "sha256": hashlib.sha256((tmp_path / f"out/{split}.jsonl").read_bytes()).hexdigest(),
        }
    assert sum(entry["documents"] for entry in manifest["splits"].values()) == 30
    assert manifest["dropped"] == {"empty": 3, "duplicates": 0}
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    assert manifest["details"] == {"files": [{"path": str(source), "bytes": source.stat().st_size, "sha256": sha256}]}
    assert manifest["provenance"]["config_hash"] == digest(job)


def test_the_same_job_gives_the_same_bytes(tmp_path: Path) -> None:
    source = jsonl_with(tmp_path / "a.jsonl", [f"Story {i}" for i in range(30)])
    first, second = (build_corpus(text_job(source), tmp_path / name)["splits"] for name in "ab")
    assert first == second


def test_repeated_documents_stay_on_one_side(tmp_path: Path) -> None:
    texts = [f"Story {i % 20}" for i in range(60)]
    build_corpus(text_job(jsonl_with(tmp_path / "a.jsonl", texts)), tmp_path / "out")
    written = documents_in(tmp_path / "out")
    assert not set(written["train"]) & set(written["valid"])
    assert sum(map(len, written.values())) == 60


def test_training_documents_that_validation_holds_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[Split, str]] = [
        *(("valid", text) for text in ("a", "b", "", "b")),
        *(("train", text) for text in ("c", "b", "a ", "c", "b", " ")),
    ]
    manifest = build_corpus(published(monkeypatch, rows), tmp_path)
    assert documents_in(tmp_path) == {"train": ["c", "a ", "c"], "valid": ["a", "b", "b"]}
    assert manifest["dropped"] == {"empty": 2, "duplicates": 2}
    assert manifest["details"] == {"hub": "a/b"}


def test_the_web_corpus_holds_every_chapter_once(web_corpus: Path) -> None:
    manifest = json.loads((web_corpus / "manifest.json").read_text(encoding="utf-8"))
    written = documents_in(web_corpus)
    assert len({*written["train"], *written["valid"]}) == sum(map(len, written.values())) == 1189
    assert sum(entry["bytes"] for entry in manifest["splits"].values()) > 4_000_000
    assert manifest["splits"]["train"]["documents"] == len(written["train"])
    assert 30 < len(written["valid"]) < 90


# --- what is refused ---


@pytest.mark.parametrize(
    ("fraction", "split", "remedy"), [(1e-9, "valid", "raise data.valid"), (1 - 1e-9, "train", "lower data.valid")]
)
def test_an_empty_split_is_refused_and_leaves_nothing(tmp_path: Path, fraction: float, split: str, remedy: str) -> None:
    source = jsonl_with(tmp_path / "a.jsonl", ["one", "two"])
    with pytest.raises(UserError) as raised:
        build_corpus(text_job(source, valid_fraction=fraction), tmp_path / "out")
    assert all(word in str(raised.value) for word in ("too small", "2 documents", f"{split} split empty", remedy))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_fault_half_way_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    good = jsonl_with(tmp_path / "good.jsonl", [f"Story {i}" for i in range(30)])
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="offset 3"):
        build_corpus(text_job(good, bad), tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    build_corpus(text_job(good), tmp_path / "old")
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    with pytest.raises(UserError, match="offset 3"):
        build_corpus(text_job(good, bad), tmp_path / "old")
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before
    assert set(before) == {"train.jsonl", "valid.jsonl", "manifest.json"}


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(path: Path) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    source = jsonl_with(tmp_path / "a.jsonl", [f"Story {i}" for i in range(30)])
    monkeypatch.setattr(corpora, "sha256_of", no_space)
    with pytest.raises(UserError, match="the disk is full"):
        build_corpus(text_job(source), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_or_cut_corpus_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no corpus file .*train.jsonl; make it with"):
        next(read_documents(tmp_path / "train.jsonl"))
    (tmp_path / "train.jsonl").write_text('{"text": "whole"}\n{"text": "cu')
    documents: Iterator[str] = read_documents(tmp_path / "train.jsonl")
    assert next(documents) == "whole"
    with pytest.raises(UserError, match=r"train.jsonl:2: .* cut short"):
        next(documents)
