import json
from pathlib import Path

import pytest

from tapernorm.util.errors import UserError
from tapernorm_lab.data.manifest import SCHEMA_VERSION, read_manifest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"schema_version": SCHEMA_VERSION + 1, "kind": "tokens"}, ["schema version 2", "reads 1"]),
        ({"kind": "tokens"}, ["schema version None"]),
        ({"schema_version": SCHEMA_VERSION, "kind": "corpus"}, ["'corpus'", "'tokens' is needed"]),
    ],
)
def test_another_schema_or_kind_is_refused(tmp_path: Path, content: object, words: list[str]) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError) as raised:
        read_manifest(tmp_path, "tokens")
    assert all(word in str(raised.value) for word in [*words, "tapernorm tokens --out"])


def test_a_missing_or_cut_manifest_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"manifest.json is missing; make it with `tapernorm tokens"):
        read_manifest(tmp_path / "nowhere", "tokens")
    (tmp_path / "manifest.json").write_text('{"kind": "tok')
    with pytest.raises(UserError, match="is not JSON"):
        read_manifest(tmp_path, "tokens")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"n": ' + "1" * 5000 + "}", "\0", "", b"\xff", "[1]", "3"])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=f"{path} is damaged"):
        read_manifest(tmp_path, "tokens")


@pytest.mark.parametrize(
    "changes", [{"splits": None}, {"splits": [1]}, {"splits": {"train": 3}}, {"vocab_size": "x"}, {"dtype": None}]
)
def test_a_value_of_another_type_is_named(tmp_path: Path, changes: dict[str, object]) -> None:
    whole = {"schema_version": SCHEMA_VERSION, "kind": "tokens", "splits": {}, "vocab_size": 3, "dtype": "uint16"}
    (tmp_path / "manifest.json").write_text(json.dumps({**whole, **changes}))
    with pytest.raises(UserError, match=rf"manifest.json is damaged \({next(iter(changes))}"):
        read_manifest(tmp_path, "tokens")


def test_what_a_manifest_lacks_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    whole = {"schema_version": SCHEMA_VERSION, "kind": "corpus", "splits": {"train": {}}}
    (tmp_path / "manifest.json").write_text(json.dumps(whole))
    manifest = read_manifest(tmp_path, "corpus")
    for look_up in (lambda: manifest["sources"], lambda: manifest["splits"]["train"]["documents"]):
        with pytest.raises(UserError, match=r"manifest.json holds no '(sources|documents)'"):
            look_up()
    assert manifest.get("sources") is None
