"""The manifest that lies beside every corpus, tokenizer, token stream and set of blocks, and says what it is."""

from pathlib import Path
from typing import Any, Literal

from tapernorm.util.atomic_files import read_json
from tapernorm.util.errors import UserError

SCHEMA_VERSION = 1
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


def content_of(folder: Path) -> Any:
    """Hashes of what the corpus, tokenizer, token stream or blocks in `folder` hold; None where there is none yet."""
    if not (folder / "manifest.json").is_file():
        return None
    manifest = read_json(folder / "manifest.json")
    if not isinstance(manifest, dict):
        return None
    splits = manifest.get("splits", {})
    return manifest.get("sha256", {name: split.get("sha256") for name, split in splits.items()})


def read_manifest(folder: Path, kind: Kind) -> dict[str, Any]:
    """The manifest of `folder`, which must hold a `kind` written with this schema version.

    Raises:
        UserError: there is none, it is not JSON, or it is of another kind or schema version. A key that the manifest
            lacks raises UserError when it is looked up.
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
