import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from writing import data_config, parquet_with

from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest
from tapernorm_lab.config.jobs import CorpusJob
from tapernorm_lab.data import corpus as corpora
from tapernorm_lab.data.corpus import SPLITS, build_corpus, read_documents, split_of
from tapernorm_lab.data.sources import Source, Split


def text_job(*files: Path, valid_fraction: float = 0.3) -> CorpusJob:
    names = tuple(str(file) for file in files)
    return CorpusJob(data=(data_config("text", files=names, field="text", valid_fraction=valid_fraction),))


def jsonl_with(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def documents_in(folder: Path) -> dict[str, list[str]]:
    return {split: list(read_documents(folder / f"{split}.jsonl")) for split in SPLITS}


def published(monkeypatch: pytest.MonkeyPatch, rows: list[tuple[Split, str]]) -> CorpusJob:
    """A job whose source yields `rows` in their publisher's splits."""
    monkeypatch.setattr(corpora, "open_source", lambda _: Source(lambda: iter(rows), {"hub": "a/b"}))
    return CorpusJob(data=(data_config("tinystories"),))


# --- the split ---


@given(text=st.text(st.characters(exclude_categories=["Cs"])), low=st.floats(0, 1), high=st.floats(0, 1))
def test_the_split_is_the_sha256_of_the_text(text, low, high):
    low, high = sorted((low, high))
    share = int(hashlib.sha256(text.encode()).hexdigest(), 16) / 2**256
    if abs(share - high) > 1e-12:
        assert split_of(text, high) == ("valid" if share < high else "train")
    assert (split_of(text, low), split_of(text, high)) != ("valid", "train")  # a larger share only moves to valid


# --- what is written ---


def test_every_document_lands_in_one_split_untouched_and_in_order(tmp_path):
    texts = [f"{i}\t <|endoftext|> é😀\u2028\x85\x00\r\n  " for i in range(50)]
    build_corpus(text_job(jsonl_with(tmp_path / "a.jsonl", texts)), tmp_path / "out")
    written = documents_in(tmp_path / "out")
    assert written == {split: [text for text in texts if split_of(text, 0.3) == split] for split in SPLITS}
    assert all(written.values())


def test_the_manifest_counts_what_the_files_hold(tmp_path):
    texts = [f"é {i}" for i in range(30)] + ["", " \n\t\u3000", "\n"]
    source = jsonl_with(tmp_path / "a.jsonl", texts)
    job = text_job(source)
    manifest = build_corpus(job, tmp_path / "out")
    assert json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8")) == manifest
    assert (manifest["schema_version"], manifest["kind"]) == (1, "corpus")
    for split, documents in documents_in(tmp_path / "out").items():
        assert manifest["splits"][split] == {
            "documents": len(documents),
            "bytes": sum(len(text.encode()) for text in documents),
            "sha256": hashlib.sha256((tmp_path / f"out/{split}.jsonl").read_bytes()).hexdigest(),
        }
    assert sum(entry["documents"] for entry in manifest["splits"].values()) == 30
    assert manifest["dropped"] == {"empty": 3, "duplicates": 0}
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    described = {
        "source": "text",
        "documents": {split: manifest["splits"][split]["documents"] for split in SPLITS},
        "details": {"files": [{"path": str(source), "bytes": source.stat().st_size, "sha256": sha256}]},
    }
    assert manifest["sources"] == [described]
    assert manifest["provenance"]["config_hash"] == digest(job)


def test_training_documents_that_validation_holds_are_dropped(tmp_path, monkeypatch):
    rows: list[tuple[Split, str]] = [
        *(("valid", text) for text in ("a", "b", "", "b")),
        *(("train", text) for text in ("c", "b", "a ", "c", "b", " ")),
    ]
    manifest = build_corpus(published(monkeypatch, rows), tmp_path)
    assert documents_in(tmp_path) == {"train": ["c", "a ", "c"], "valid": ["a", "b", "b"]}
    assert manifest["dropped"] == {"empty": 2, "duplicates": 2}
    assert manifest["sources"][0]["details"] == {"hub": "a/b"}


# --- several sources ---


def test_sources_follow_one_another_each_with_its_own_split(tmp_path):
    stories, notes = [f"Story {i}" for i in range(40)], [f"Note {i}" for i in range(40)]
    parts = [jsonl_with(tmp_path / "a.jsonl", stories), jsonl_with(tmp_path / "b.jsonl", notes)]
    data = tuple(
        data_config("text", files=(str(path),), field="text", valid_fraction=fraction)
        for path, fraction in zip(parts, (0.2, 0.6), strict=True)
    )
    manifest = build_corpus(CorpusJob(data=data), tmp_path / "out")
    expected = {
        split: [*(t for t in stories if split_of(t, 0.2) == split), *(t for t in notes if split_of(t, 0.6) == split)]
        for split in SPLITS
    }
    assert documents_in(tmp_path / "out") == expected
    counts = [source["documents"] for source in manifest["sources"]]
    assert [sum(c.values()) for c in counts] == [40, 40]
    assert {split: sum(c[split] for c in counts) for split in SPLITS} == {s: len(expected[s]) for s in SPLITS}


def test_no_source_trains_on_what_another_holds_out(tmp_path):
    """The first source would train on texts that the second, read later, holds out."""
    texts = [f"Story {i}" for i in range(60)]
    source = str(jsonl_with(tmp_path / "a.jsonl", texts))
    data = tuple(data_config("text", files=(source,), field="text", valid_fraction=f) for f in (0.1, 0.5))
    manifest = build_corpus(CorpusJob(data=data), tmp_path / "out")
    written = documents_in(tmp_path / "out")
    assert not set(written["train"]) & set(written["valid"])
    both = sum(split_of(text, 0.1) == "train" and split_of(text, 0.5) == "valid" for text in texts)
    assert manifest["dropped"]["duplicates"] == both > 0


def test_max_train_documents_keeps_the_first_of_each_source_and_all_validation(tmp_path):
    texts = ["", *(f"Story {i}" for i in range(50))]
    source = str(jsonl_with(tmp_path / "a.jsonl", texts))
    few = data_config("text", files=(source,), field="text", valid_fraction=0.3, max_train_documents=4)
    build_corpus(CorpusJob(data=(few,)), tmp_path / "out")
    expected = {split: [text for text in texts[1:] if split_of(text, 0.3) == split] for split in SPLITS}
    assert documents_in(tmp_path / "out") == {"train": expected["train"][:4], "valid": expected["valid"]}
    all_of_it = few.model_copy(update={"max_train_documents": 1000})
    build_corpus(CorpusJob(data=(all_of_it,)), tmp_path / "all")
    assert documents_in(tmp_path / "all") == expected


def test_no_more_of_a_published_source_is_read_than_needed(tmp_path, monkeypatch):
    read: list[str] = []

    def rows() -> Iterator[tuple[Split, str]]:
        for split, text in (("valid", "a"), *(("train", f"Story {i}") for i in range(100))):
            read.append(text)
            yield split, text

    monkeypatch.setattr(corpora, "open_source", lambda _: Source(rows, {}))
    build_corpus(CorpusJob(data=(data_config("tinystories", max_train_documents=3),)), tmp_path)
    assert documents_in(tmp_path) == {"train": ["Story 0", "Story 1", "Story 2"], "valid": ["a"]}
    assert len(read) <= 8  # once to find validation's end, once for three training documents


def test_all_text_can_be_validation(tmp_path):
    texts = [f"Story {i}" for i in range(30)]
    source = jsonl_with(tmp_path / "a.jsonl", texts)
    manifest = build_corpus(text_job(source, valid_fraction=1), tmp_path / "out")
    assert documents_in(tmp_path / "out") == {"train": [], "valid": texts}
    assert manifest["splits"]["train"] == {"documents": 0, "bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    two = (*text_job(source, valid_fraction=1).data, *text_job(source, valid_fraction=1 - 1e-9).data)
    with pytest.raises(UserError, match="the train split empty"):  # the second source was to be trained on
        build_corpus(CorpusJob(data=two), tmp_path / "two")


# --- few documents ---


PAGES = "\n\n".join(f"Page {i}. The wind had turned, and nobody spoke of it." for i in range(900))


def book(folder: Path, text: str = PAGES, name: str = "book.txt") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(text.encode())
    return folder / name


@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.5, 0.95])
def test_one_book_is_split_by_passages_and_no_text_is_lost(tmp_path, fraction, capsys):
    manifest = build_corpus(text_job(book(tmp_path), valid_fraction=fraction), tmp_path / "out")
    written = documents_in(tmp_path / "out")
    held_out = sum(map(len, written["valid"]))
    assert held_out / len(PAGES) == pytest.approx(fraction, rel=0.2)
    pages = {split: {page for text in texts for page in text.split("\n\n") if page} for split, texts in written.items()}
    assert not pages["train"] & pages["valid"]
    assert pages["train"] | pages["valid"] == set(PAGES.split("\n\n"))  # cut between pages alone
    identity = hashlib.sha256(PAGES.encode()).hexdigest()
    assert manifest["passages"] == {"documents": 1, "characters": len(PAGES), "sha256": [identity]}
    assert manifest["splits"]["valid"]["documents"] == len(written["valid"])
    assert manifest["dropped"] == {"empty": 0, "duplicates": 0}
    told = capsys.readouterr().err
    assert "one document" in told
    assert told.count("\n") == 1
    assert (
        build_corpus(text_job(book(tmp_path), valid_fraction=fraction), tmp_path / "again")["splits"]
        == manifest["splits"]
    )


@pytest.mark.parametrize("fraction", [0.05, 0.95])  # the hash puts the book on either side
@pytest.mark.parametrize("copies", [2, 5])
def test_copies_of_one_book_never_lie_on_both_sides(tmp_path, fraction, copies):
    files = [book(tmp_path, name=f"copy{i}.txt") for i in range(copies)]
    build_corpus(text_job(*files, valid_fraction=fraction), tmp_path / "many")
    build_corpus(text_job(files[0], valid_fraction=fraction), tmp_path / "one")
    many, one = documents_in(tmp_path / "many"), documents_in(tmp_path / "one")
    assert many == {split: texts * copies for split, texts in one.items()}


def test_copies_in_two_sources_are_split_alike_and_a_text_that_is_all_held_out_is_not_trained_on(tmp_path):
    other = PAGES.replace("wind", "tide")
    files = [str(book(tmp_path, text, f"{name}.txt")) for name, text in (("a", PAGES), ("b", other))]

    def job(*fractions: float) -> CorpusJob:
        made = ((files, fractions[0]), (files[:1], fractions[1]))
        return CorpusJob(
            data=tuple(
                data_config("text", files=tuple(names), field="text", valid_fraction=fraction)
                for names, fraction in made
            )
        )

    build_corpus(job(0.05, 0.5), tmp_path / "out")
    written = documents_in(tmp_path / "out")
    pages = {split: {page for text in texts for page in text.split("\n\n") if page} for split, texts in written.items()}
    assert not pages["train"] & pages["valid"]
    manifest = build_corpus(job(1e-9, 1.0), tmp_path / "all")
    assert documents_in(tmp_path / "all") == {"train": [other], "valid": [PAGES]}
    assert "passages" not in manifest  # the hash gave both splits a document
    assert manifest["dropped"]["duplicates"] == 1


def test_few_documents_that_the_hash_puts_on_one_side_are_split_by_passages(tmp_path, capsys):
    """The control: as soon as the hash gives validation a document, all are whole, and nothing is told."""
    texts = [PAGES[place : place + 3000].strip() for place in range(0, 30_000, 3000)]
    files = [book(tmp_path, text, f"{i}.txt") for i, text in enumerate(texts)]
    shares = sorted(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64 for text in texts)
    manifest = build_corpus(text_job(*files, valid_fraction=shares[0] * 0.999), tmp_path / "parted")
    written = documents_in(tmp_path / "parted")
    identities = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    assert manifest["passages"] == {"documents": 10, "characters": sum(map(len, texts)), "sha256": identities}
    assert all(any(piece in text for text in texts) for piece in written["train"] + written["valid"])
    assert sum(map(len, written["train"] + written["valid"])) == sum(map(len, texts))
    assert "10 documents" in capsys.readouterr().err
    whole = build_corpus(text_job(*files, valid_fraction=shares[0] * 1.001), tmp_path / "whole")
    assert "passages" not in whole
    assert sorted(text for texts_of in documents_in(tmp_path / "whole").values() for text in texts_of) == sorted(texts)
    assert capsys.readouterr().err == ""


def test_max_train_documents_counts_documents_and_not_their_passages(tmp_path):
    other = PAGES.replace("wind", "tide")
    files = tuple(str(book(tmp_path, text, f"{name}.txt")) for name, text in (("a", PAGES), ("b", other)))
    data = data_config("text", files=files, field="text", valid_fraction=1e-3, max_train_documents=1)
    build_corpus(CorpusJob(data=(data,)), tmp_path / "out")
    train = documents_in(tmp_path / "out")["train"]
    assert "".join(train) in PAGES
    assert not any("tide" in text for text in train)


@pytest.mark.parametrize("text", ["ab", "word " * 10])
def test_a_text_too_short_for_passages_says_what_is_needed(tmp_path, text):
    with refused("1 documents", "320 characters", "add text"):
        build_corpus(text_job(book(tmp_path, text), valid_fraction=0.05), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


# --- what is refused ---


@pytest.mark.parametrize(
    ("fraction", "split", "remedy"), [(1e-9, "valid", "raise data.valid"), (1 - 1e-9, "train", "lower data.valid")]
)
def test_an_empty_split_is_refused_and_leaves_nothing(tmp_path, fraction, split, remedy):
    source = jsonl_with(tmp_path / "a.jsonl", ["one", "two"])
    with refused("too small", "2 documents", f"{split} split empty", remedy):
        build_corpus(text_job(source, valid_fraction=fraction), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_fault_half_way_leaves_nothing_and_keeps_what_was_there(tmp_path):
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


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, '{"text": ' + "1" * 5000 + "}", "\0", '{"story": "a"}', '["text"]', '{"text": null}', b"\xff"],
)
def test_a_damaged_line_of_a_corpus_is_named(tmp_path, line):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"text": "whole"}\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    documents = read_documents(path)
    assert next(documents) == "whole"
    with pytest.raises(UserError, match=r"train.jsonl:2: the line is damaged"):
        next(documents)


def test_a_null_is_dropped_and_counted_as_empty_in_every_format(tmp_path, monkeypatch):
    texts = [None, *(f"Story {i}" for i in range(30)), None]
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    parquet = parquet_with(tmp_path / "a.parquet", text=texts)
    rows = {"train": texts, "validation": [None, "One", None]}
    hub = {name: datasets.Dataset.from_dict({"text": column}) for name, column in rows.items()}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split, **__: hub[split])
    jobs = {
        "jsonl": text_job(jsonl),
        "parquet": text_job(parquet),
        "hub": CorpusJob(data=(data_config("tinystories"),)),
    }
    dropped = {name: build_corpus(job, tmp_path / name)["dropped"]["empty"] for name, job in jobs.items()}
    assert dropped == {"jsonl": 2, "parquet": 2, "hub": 4}
    assert documents_in(tmp_path / "jsonl") == documents_in(tmp_path / "parquet")
