"""The manifest that lies beside every corpus, tokenizer, token stream and set of blocks: what it is, and of what."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from tapernorm.util.atomic_files import read_json, whole_file
from tapernorm.util.errors import UserError
from tapernorm.util.provenance import provenance

SCHEMA_VERSION = 1
GPT2_BPE, HUB = "gpt2_bpe", "hub"  # a tokenizer's model_type; any other is SentencePiece's
_FEW = 3  # files that are named
_TYPES = {  # of what a manifest may hold
    "splits": dict,
    "details": dict,
    "literal_u2581": dict,
    "files": dict,
    "sources": list,
    "vocab_size": int,
    "eod": int,
    "context": int,
    "dtype": str,
    "model_type": str,
    "sha256": str,
    "tokenizer_sha256": str,
}

Kind = Literal["corpus", "tokenizer", "tokens", "blocks"]


def made_manifest(kind: Kind, *, config_hash: str | None = None, **says: Any) -> dict[str, Any]:
    """The manifest of a `kind` that is written here and now, with what it `says`."""
    made_by = provenance() if config_hash is None else provenance(config_hash=config_hash)
    return {"schema_version": SCHEMA_VERSION, "kind": kind, **says, "provenance": made_by}


@contextmanager
def whole_files(out: Path, *names: str) -> Iterator[dict[str, Path]]:
    """Yield temporaries of these files and of manifest.json in `out`; on success they become them, the manifest last.

    On any error they are removed, and what was in `out` stays.
    """
    with ExitStack() as files:
        yield {name: files.enter_context(whole_file(out / name)) for name in ("manifest.json", *names)}


def content_of(folder: Path) -> Any:
    """Hashes of what the corpus, tokenizer, token stream or blocks in `folder` hold; None where there is none yet."""
    if not (folder / "manifest.json").is_file():
        return None
    manifest = read_json(folder / "manifest.json")
    splits = manifest.get("splits", {})
    return manifest.get("sha256", {name: split.get("sha256") for name, split in splits.items()})


def read_manifest(folder: Path, kind: Kind) -> dict[str, Any]:
    """The manifest of `folder`, which must hold a `kind` written with this schema version.

    Raises:
        UserError: there is none, it is damaged, or of another kind or schema version; a missing key, when looked up.
    """
    path = folder / "manifest.json"
    remedy = f"make it with `tapernorm {'tokens' if kind == 'blocks' else kind} --out {folder} …`"
    try:
        manifest = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no {kind} in {folder}: {path.name} is missing; {remedy}") from None
    if (found := manifest.get("kind")) != kind:
        raise UserError(f"{folder} holds {found!r} and a {kind!r} is needed; {remedy}")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        version = manifest.get("schema_version")
        raise UserError(f"{path} has schema version {version!r} and this code reads {SCHEMA_VERSION}; {remedy}")
    _require_types(manifest, path)
    return manifest


def _require_types(manifest: dict[str, Any], path: Path) -> None:
    """Raise UserError where a value is of another type than any that is written there."""
    faults = [key for key, kind in _TYPES.items() if key in manifest and not isinstance(manifest[key], kind)]
    if not faults:
        faults = [f"splits.{key}" for key, entry in manifest.get("splits", {}).items() if not isinstance(entry, dict)]
    if faults:
        raise UserError(f"{path} is damaged ({', '.join(faults)} is of the wrong type): run its job again")


def origin_of(manifest: dict[str, Any]) -> str:
    """One line about the text behind blocks: source, version, what was filtered; from the manifest of the blocks."""
    details = manifest["details"]
    named = [_text(source["source"], source["details"]) for source in details.get("sources", [])]
    named += [_place(details)] if details.keys() & {"hub", "files"} else []  # rows that came tokenized
    if "seen" in details:
        seen = details["seen"]
        sample = "" if seen["rows"] == seen["of"] else f"a sample of {seen['rows']:,} of the {seen['of']:,} rows of "
        named.append(f"{details['kept']:,} of {details['rows']:,} rows have no token that {sample}the other text lacks")
    return "; ".join(named)


def _text(source: str, details: dict[str, Any]) -> str:
    if source == "python_stdlib":
        library, part = details["library"], f"{details['part']} half" if details["part"] else "all"
        return (
            f"standard library of {details['implementation']} {details['python']}, {part}: {details['files']:,} of"
            f" {library['files']:,} files, sha256 {library['sha256'][:12]}"
        )
    if source == "web":
        return f"{details['package']} {details['version']}, sha256 {details['sha256'][:12]}"
    return _place(details)


def _place(details: dict[str, Any]) -> str:
    """A data set of the hub, or local files: the first few by name, and one hash of all."""
    if "hub" in details:
        return f"{details['hub']} at {details.get('revision') or 'its newest revision'}"
    files = details["files"]
    named = [Path(file["path"]).name for file in files]
    more = f" and {len(files) - _FEW} more" if len(files) > _FEW else ""
    whole = "\n".join(file["sha256"] for file in files)
    sha256 = files[0]["sha256"] if len(files) == 1 else hashlib.sha256(whole.encode()).hexdigest()
    return f"{', '.join(named[:_FEW])}{more}, sha256 {sha256[:12]}"
