"""Files that jobs wrote: JSON, read, checked and looked into by dotted place."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from tapernorm.util.atomic_files import parse_json as parse
from tapernorm.util.atomic_files import sha256_of
from tapernorm.util.errors import UserError

SCHEMA_VERSION = 1


def read_document(path: Path, *kinds: str) -> dict[str, Any]:
    """A JSON file that a job wrote, of one of these `kinds` and of the schema that this version reads."""
    document = parse_json(path, text_of(path))
    for key, wanted in (("schema_version", (SCHEMA_VERSION,)), ("kind", kinds)):
        found = document.get(key) if isinstance(document, dict) else None
        if found not in wanted:
            read = " or ".join(map(repr, wanted))
            raise UserError(f"{path}: {key} is {found!r} and this version reads {read}: run the job again")
    return document


def each_once(
    paths: Iterable[Path], kinds: Sequence[str], places: Mapping[str, str]
) -> dict[tuple[Any, ...], tuple[Path, dict[str, Any]]]:
    """What stands at the `places` of a file (name -> dotted place) -> the file, of one of these kinds, and its content.

    Raises:
        UserError: a file is missing, damaged or of another schema, or two hold the same.
    """
    found: dict[tuple[Any, ...], tuple[Path, dict[str, Any]]] = {}
    for path in map(Path, paths):
        document = read_document(path, *kinds)
        key = tuple(value_at(document, place, path) for place in places.values())
        if key in found:
            named = ", ".join(f"{name} {value}" for name, value in zip(places, key, strict=True))
            raise UserError(f"{path} and {found[key][0]} both hold {named}: give one of them")
        found[key] = (path, document)
    return found


def read_of_run(run: Path, name: str, kind: str) -> dict[str, Any]:
    """The file `name` in a run folder, which tells of the weights beside it.

    Raises:
        UserError: it is no file of that `kind`, or tells of other weights, those of an earlier run.
    """
    path, weights = run / name, run / "model.safetensors"
    document = read_document(path, kind)
    if value_at(document, "provenance.weights_sha256", path) != (sha256_of(weights) if weights.is_file() else None):
        raise UserError(f"{path} tells of other weights than those in {weights}: run the job that wrote it again")
    return document


def value_at(document: dict[str, Any], place: str, path: Path) -> Any:
    """What stands at a dotted `place`; under `values`, its number without the unit."""
    try:
        value = reduce(lambda node, key: node[key], place.split("."), document)
        return value["value"] if place.startswith("values.") else value
    except (KeyError, TypeError):
        raise UserError(f"{path} holds no {place}: it was not written by this version; run the job again") from None


def stored(path: Path) -> Path:
    """The file, or where it is not there its compressed form, as it is published."""
    packed = path.with_name(f"{path.name}.gz")
    return path if path.is_file() or not packed.is_file() else packed


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no file {path}: the job that writes it has not finished; run it first") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error}): the file is damaged; run the job again") from None


def parse_json(path: Path, text: str, where: str = "") -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise UserError(f"{path}{where} is not JSON ({error}): the file is damaged; run the job again") from None
