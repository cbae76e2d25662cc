"""Readers of the JSON files of jobs: parse, check, and return values by their dotted place."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from tapernorm.util.atomic_files import parse_json as parse
from tapernorm.util.atomic_files import sha256_of
from tapernorm.util.errors import UserError

SCHEMA_VERSION = 1


def read_document(path: Path, *kinds: str) -> dict[str, Any]:
    """Read the JSON file of a job.

    Raises:
        UserError: the file is missing or damaged, or has another kind than `kinds` or another schema version.
    """
    document = parse_json(path, text_of(path))
    for key, wanted in (("schema_version", (SCHEMA_VERSION,)), ("kind", kinds)):
        found = document.get(key) if isinstance(document, dict) else None
        if found not in wanted:
            read = " or ".join(map(repr, wanted))
            raise UserError(
                f"{path} has {key} {found!r}, and this version reads {read}: give another file, or run the job again"
            )
    return document


def each_once(
    paths: Iterable[Path], kinds: Sequence[str], places: Mapping[str, str]
) -> dict[tuple[Any, ...], tuple[Path, dict[str, Any]]]:
    """Read files of these kinds; return the values at `places` (name -> dotted place) -> path and content.

    Raises:
        UserError: a file is missing, damaged or of another schema, or two files have the same values.
    """
    found: dict[tuple[Any, ...], tuple[Path, dict[str, Any]]] = {}
    for path in map(Path, paths):
        document = read_document(path, *kinds)
        key = tuple(value_at(document, place, path) for place in places.values())
        if key in found:
            named = ", ".join(f"{name} {value}" for name, value in zip(places, key, strict=True))
            raise UserError(f"{path} and {found[key][0]} both hold {named}: give only one of them")
        found[key] = (path, document)
    return found


def read_of_run(run: Path, name: str, kind: str) -> dict[str, Any]:
    """Read the file `name` in a run folder, which was computed from the weights there.

    Raises:
        UserError: the file has another kind, or was computed from other weights.
    """
    path, weights = run / name, run / "model.safetensors"
    document = read_document(path, kind)
    if value_at(document, "provenance.weights_sha256", path) != (sha256_of(weights) if weights.is_file() else None):
        raise UserError(
            f"{path} was computed from other weights than those in {weights}: run the job that writes it again"
        )
    return document


def value_at(document: dict[str, Any], place: str, path: Path) -> Any:
    """Return the value at a dotted `place`; under `values`, the number without its unit."""
    try:
        value = reduce(lambda node, key: node[key], place.split("."), document)
        return value["value"] if place.startswith("values.") else value
    except (KeyError, TypeError):
        raise UserError(f"{path} holds no {place}, as another version wrote it: run the job again") from None


def stored(path: Path) -> Path:
    """Return the path, or that of the compressed file if only that exists."""
    packed = path.with_name(f"{path.name}.gz")
    return path if path.is_file() or not packed.is_file() else packed


def text_of(path: Path) -> str:
    """Read a text file.

    Raises:
        UserError: it is missing, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist: run the job that writes it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged, as it is not UTF-8 ({error}): run the job again") from None


def parse_json(path: Path, text: str, where: str = "") -> Any:
    """Parse the JSON `text` of a file; messages name the file and `where` in it.

    Raises:
        UserError: it is no JSON.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise UserError(f"{path}{where} is damaged, as it is not JSON ({error}): run the job again") from None
