import hashlib
import platform
import sysconfig
from pathlib import Path

import pytest
from writing import data_config

from tapernorm.util.errors import UserError
from tapernorm_lab.config.jobs import CorpusJob
from tapernorm_lab.data.corpus import build_corpus, read_documents, split_of
from tapernorm_lab.data.sources import open_source
from tapernorm_lab.data.stdlib import standard_library

LATIN = b"# coding: latin-1\nname = '\xe9'\n"
MARKED = b"\xef\xbb\xbfx = 1\r\ny = '\xc3\xa9'\r\n"
READABLE = {
    "abc.py": b"import this\n",
    "json/decoder.py": "# Gruß\n".encode(),
    "json/encoder.py": b"\t\tpass\n",
    "old.py": LATIN,
    "marked.py": MARKED,
    "test.py": b"# a module, not the test suite\n",
    "lib/site.py": b"# nothing\n",
}
UNREADABLE = {
    "bad_utf8.py": b"x = '\xff'\n",
    "bad_cookie.py": b"# coding: uft-8\n",
    "no_text.py": b"# coding: hex\n",
    "surrogate.py": b"# coding: utf-7\nx = '+2D0-'\n",
}
FOREIGN = ("site-packages/a.py", "dist-packages/b.py", "__pycache__/c.py", "test/d.py", "json/tests/e.py")


def library(root: Path, names: dict[str, bytes]) -> Path:
    for name, raw in names.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return root


@pytest.fixture
def small(tmp_path):
    root = library(tmp_path / "lib", {**READABLE, **UNREADABLE, **dict.fromkeys(FOREIGN, b"foreign = True\n")})
    (root / "data.txt").write_text("no source")
    (root / "sitecustomize.py").symlink_to(root / "abc.py")
    return root


def rank(text: str) -> str:
    return hashlib.sha256(b"python_stdlib/" + text.encode()).hexdigest()


def test_every_readable_file_comes_once_in_the_order_of_its_hash(small):
    texts = [raw.decode("utf-8-sig") for name, raw in READABLE.items() if name != "old.py"] + [LATIN.decode("latin-1")]
    found = list(standard_library(None, small).documents())
    assert found == sorted(texts, key=rank)
    assert found != [READABLE[name].decode("utf-8-sig") for name in sorted(READABLE) if name != "old.py"]
    assert "x = 1\r\ny = 'é'\r\n" in found  # no mark, newlines as they are


def test_what_cannot_be_read_is_named(small):
    details = standard_library(None, small).details
    assert details["library"]["skipped"] == sorted(UNREADABLE)
    assert (details["files"], details["library"]["files"]) == (len(READABLE), len(READABLE))
    assert details["python"] == platform.python_version()
    assert details["implementation"] == platform.python_implementation()


def test_one_hash_stands_for_the_whole_library(small, tmp_path):
    copy = library(tmp_path / "copy", dict(reversed(READABLE.items())))  # made in another order, without the rest
    first = standard_library("first", small).details["library"]["sha256"]
    assert standard_library("second", copy).details["library"]["sha256"] == first
    (copy / "abc.py").write_bytes(b"import that\n")
    changed = standard_library(None, copy).details["library"]["sha256"]
    (copy / "abc.py").write_bytes(READABLE["abc.py"])
    (copy / "abc.py").rename(copy / "abd.py")
    assert len({first, changed, standard_library(None, copy).details["library"]["sha256"]}) == 3


@pytest.fixture(scope="module")
def own():
    """The running Python's library: its halves and the whole."""
    return {part: standard_library(part) for part in ("first", "second", None)}


def test_the_halves_are_disjoint_and_make_the_whole(own):
    first, second, whole = (list(library.documents()) for library in own.values())
    assert first + second == whole == sorted(whole, key=rank)
    assert not set(first) & set(second)
    assert abs(len(first) - len(second)) < 5 * len(whole) ** 0.5


def test_the_half_says_nothing_of_the_split(own):
    """Control: without the salt, all of the first half with a small hash would be validation at 0.5."""
    texts = list(own["first"].documents())
    held_out = sum(split_of(text, 0.5) == "valid" for text in texts)
    assert abs(held_out - len(texts) / 2) < 5 * (len(texts) / 4) ** 0.5


def test_this_python_s_library_is_read_without_what_others_installed(own):
    library_here = own[None]
    names = {path.name for path in library_here.files}
    assert {"argparse.py", "ast.py", "tokenize.py"} <= names
    assert "torch" not in {part for path in library_here.files for part in path.parts}
    assert all(path.is_relative_to(sysconfig.get_path("stdlib")) for path in library_here.files)
    assert len(library_here.files) > 300


def test_a_library_without_source_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no .py file.* another data.source"):
        standard_library(None, tmp_path)


def test_a_corpus_of_one_half_can_be_all_validation(small, tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(small))
    data = data_config("python_stdlib", part="second", valid_fraction=1)
    manifest = build_corpus(CorpusJob(data=(data,)), tmp_path / "out")
    expected = list(standard_library("second", small).documents())
    assert list(read_documents(tmp_path / "out/valid.jsonl")) == expected
    assert list(read_documents(tmp_path / "out/train.jsonl")) == []
    assert manifest["splits"]["train"]["documents"] == 0
    assert manifest["sources"][0]["details"] == open_source(data).details
    assert manifest["sources"][0]["details"]["part"] == "second"
