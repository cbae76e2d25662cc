import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from writing import parquet_with

from tapernorm.util.errors import UserError
from tapernorm_lab.data import text_files as textfiles
from tapernorm_lab.data.text_files import SEPARATOR, documents_of, find_files


def read(path: Path, field: str = "text") -> list[str]:
    return list(documents_of(path, field))


def file_with(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --- .txt ---


def test_txt_drops_one_newline_beside_a_separator_and_nothing_else(tmp_path):
    text = "\n\n one \n\n<|endoftext|>\r\ntwo\r\nlines\t\r\n<|endoftext|>three<|endoftext|>\n<|endoftext|>\nfour\n"
    assert read(file_with(tmp_path / "a.txt", text)) == ["\n one \n", "two\r\nlines\t", "three", "", "four"]


def test_txt_ends_with_its_last_separator(tmp_path):
    assert read(file_with(tmp_path / "a.txt", "one<|endoftext|>two\n<|endoftext|>\n \n")) == ["one", "two"]


def test_txt_drops_a_byte_order_mark_at_the_start_only(tmp_path):
    assert read(file_with(tmp_path / "a.txt", "\ufeffone<|endoftext|>\ufefftwo")) == ["one", "\ufefftwo"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 13, 14, 1000])
def test_txt_is_the_same_whatever_the_chunk(tmp_path, monkeypatch, chunk):
    text = "aé<|endof<|endoftext|>😀<|endoftext|><|endoftext|>x<<|endoftext|>tail"
    monkeypatch.setattr(textfiles, "_CHUNK", chunk)
    assert read(file_with(tmp_path / "a.txt", text)) == text.split(SEPARATOR)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


# A text that itself ends in a carriage return is left out: with the newline after it, it is one line end.
@given(documents=st.lists(TEXT.filter(lambda text: not text.endswith("\r")), min_size=1), chunk=st.integers(1, 40))
def test_txt_written_with_separators_reads_back(documents, chunk, tmp_path_factory):
    path = tmp_path_factory.mktemp("txt") / "a.txt"
    path.write_bytes("".join(f"\n{text}\n{SEPARATOR}" for text in documents).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(textfiles, "_CHUNK", chunk)
        assert read(path) == documents


# --- .jsonl ---


def test_jsonl_gives_the_field_untouched(tmp_path):
    texts = ["a\nb\r\n", "", " é😀\u2028\x85 ", "<|endoftext|>", '"\\']
    lines = [json.dumps({"id": 1, "story": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    assert read(file_with(tmp_path / "a.jsonl", "\ufeff" + "\r\n\n".join(lines)), "story") == texts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"', ["a.jsonl:3", "not JSON", "column"]),
        ('["text"]', ["a.jsonl:3", "list found"]),
        ('{"story": "a", "id": 1}', ["a.jsonl:3", "no field 'text'", "'story', 'id'", "data.field"]),
        ('{"text": 5}', ["a.jsonl:3", "int", "text is needed"]),
        ('{"text": "a\\ud800"}', ["a.jsonl:3", "surrogate", "\\ud800", "character 1"]),
        ('{"text": "a", "id": ' + "1" * 5000 + "}", ["a.jsonl:3", "digits"]),
        ("[" * 100_000, ["a.jsonl:3", "nested"]),
        ("\0" * 10, ["a.jsonl:3", "not JSON"]),
        ('{"text": "a\0"}', ["a.jsonl:3", "not JSON"]),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, words):
    with refused(*words):
        read(file_with(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n\n{line}\n'))


# --- .parquet ---


def test_parquet_gives_the_column_over_batches_and_row_groups(tmp_path, monkeypatch):
    texts = [f"text {i}\n" for i in range(100)]
    table = pyarrow.table({"id": range(100), "body": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=33)
    monkeypatch.setattr(textfiles, "_PARQUET_ROWS", 7)
    assert read(tmp_path / "a.parquet", "body") == texts


def test_parquet_faults_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no column 'text'; there are 'body', 'other'"):
        read(parquet_with(tmp_path / "a.parquet", body=["x"], other=[0]))
    with pytest.raises(UserError, match=r"row 0 of column 'text' holds int"):
        read(parquet_with(tmp_path / "b.parquet", text=[1, 2]))
    with pytest.raises(UserError, match="is not a Parquet file"):
        read(file_with(tmp_path / "c.parquet", "PAR1 but not really"))
    latin = pyarrow.array([b"ok", b"ca\xe9"], pyarrow.binary()).view(pyarrow.string())
    with pytest.raises(UserError, match=r"row 1 is not UTF-8 at byte 2"):
        read(parquet_with(tmp_path / "d.parquet", text=latin))


def damaged(path: Path, share: float) -> Path:
    """Turn round one byte of the second row group of a Parquet file, at this share of the length of its text."""
    column = pyarrow.parquet.read_metadata(path).row_group(1).column(0)
    raw = bytearray(path.read_bytes())
    raw[column.data_page_offset + int(share * column.total_compressed_size)] ^= 0xFF
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("codec", ["snappy", "gzip", "zstd", "none"])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_a_damaged_page_is_named_with_its_row(tmp_path, codec, share):
    texts = [f"{i} {chr(97 + i % 26) * (i % 40)}" for i in range(100)]
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(
        table, path, row_group_size=50, compression=codec, use_dictionary=False, write_page_checksum=True
    )
    assert read(path) == texts
    found = documents_of(damaged(path, share), "text")
    assert [next(found) for _ in range(50)] == texts[:50]
    with refused(str(path), "damaged between row 50 and row 99", "write it again"):
        next(found)


def test_a_parquet_file_that_was_cut_is_named(tmp_path):
    path = parquet_with(tmp_path / "a.parquet", text=["text"] * 50)
    for size in (0, 4, 40, path.stat().st_size - 3):
        cut = file_with(tmp_path / "cut.parquet", path.read_bytes()[:size])
        with pytest.raises(UserError, match=r"cut.parquet is not a Parquet file"):
            read(cut)


# --- all of them ---


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize("chunk", [3, 1 << 20])
@pytest.mark.parametrize(("bad", "at"), [(b"\xff", 0), (b"caf\xe9 ", 3), (b"ok\xe2\x82", 2)])
def test_text_that_is_not_utf8_names_file_and_byte(tmp_path, monkeypatch, suffix, chunk, bad, at):
    monkeypatch.setattr(textfiles, "_CHUNK", chunk)
    start = {".txt": "é one<|endoftext|>two ", ".jsonl": '{"text": "é"}\n{"text": "'}[suffix].encode()
    path = file_with(tmp_path / f"a{suffix}", start + bad)
    with refused(f"{path} is not UTF-8", f"offset {len(start) + at} "):
        read(path)


def test_find_files_expands_globs_in_order_and_names_each_file_once(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "c.jsonl", "deep/d.txt", "[x].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        file_with(tmp_path / name, "x")
    monkeypatch.chdir(tmp_path)
    assert [str(p) for p in find_files(["c.jsonl", "[ab].txt", "./a.txt"])] == ["c.jsonl", "a.txt", "b.txt"]
    assert [p.name for p in find_files(["**/*.txt"])] == ["[x].txt", "a.txt", "b.txt", "d.txt"]
    assert find_files(["[x].txt"]) == [Path("[x].txt")]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("none*.txt", ["'none*.txt' matches no file"]),
        ("missing.txt", ["'missing.txt' matches no file"]),
        ("folder", ["'folder' matches no file", "'texts/*.txt'"]),
        ("a.csv", ["a.csv ends in '.csv'", ".txt, .jsonl, .parquet"]),
        ("empty.txt", ["empty.txt is empty"]),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, monkeypatch, pattern, words):
    (tmp_path / "folder").mkdir()
    file_with(tmp_path / "a.csv", "x")
    file_with(tmp_path / "empty.txt", "")
    monkeypatch.chdir(tmp_path)
    with refused(*words):
        find_files([pattern])


@pytest.mark.parametrize("pattern", ["a\0b.txt", "a" * 300 + ".txt", "", "*/" + "a" * 300])
def test_a_name_that_no_file_can_have_matches_none(pattern):
    with pytest.raises(UserError, match="matches no file"):
        find_files([pattern])


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    with open(name, "w") as file:
        file.write("text")
    with pytest.raises(UserError, match=r"caf.udce9\.txt' is not UTF-8; rename"):
        find_files([str(tmp_path / "*.txt")])


@pytest.mark.parametrize("name", ["a{b}.txt", "-dash.txt", "q'uo\"te.txt", "sp ace.txt", "new\nline.txt"])
def test_odd_names_are_names(tmp_path, name):
    path = file_with(tmp_path / name, "text")
    assert find_files([str(path)]) == find_files([f"{tmp_path}/*"]) == [path]


def peak_memory(run: Callable[[], object]) -> int:
    """Largest size of Python's own allocations while `run` runs (bytes)."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(textfiles, "_CHUNK", 1 << 16)
    document = "word " * 400 + "\n"
    unit = {".txt": document + SEPARATOR, ".jsonl": json.dumps({"text": document}) + "\n"}[suffix]
    small = file_with(tmp_path / f"small{suffix}", unit * 250)
    large = file_with(tmp_path / f"large{suffix}", unit * 2000)

    def stream(path: Path) -> int:
        return peak_memory(lambda: sum(1 for _ in documents_of(path, "text")))

    assert stream(large) < stream(small) + 100_000 < os.path.getsize(large) / 4
    assert peak_memory(lambda: read(large)) > os.path.getsize(large) / 2  # control: the measure sees a list
