"""The manifest of every corpus, tokenizer, token stream and set of blocks: its kind, content and origin."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from tapernorm.util.atomic_files import read_json, whole_file
from tapernorm.util.errors import UserError
from tapernorm.util.provenance import provenance

SCHEMA_VERSION = 1
GPT2_BPE, HUB = "gpt2_bpe", "hub"  # values of a tokenizer's model_type; all others are SentencePiece's
_FEW = 3  # most files that `origin_of` names
_TYPES = {  # key of a manifest -> type of its value
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
    """Return the manifest of a new `kind`, with the entries `says` and the provenance of this process."""
    made_by = provenance() if config_hash is None else provenance(config_hash=config_hash)
    return {"schema_version": SCHEMA_VERSION, "kind": kind, **says, "provenance": made_by}


@contextmanager
def whole_files(out: Path, *names: str) -> Iterator[dict[str, Path]]:
    """Yield a mapping from these names and manifest.json to temporary files beside them in `out`.

    On success the temporary files replace the named ones, manifest.json last. On an error they are removed, and `out`
    stays as it was.
    """
    with ExitStack() as files:
        yield {name: files.enter_context(whole_file(out / name)) for name in ("manifest.json", *names)}


def content_of(folder: Path) -> Any:
    """Return the content hashes of the corpus, tokenizer, token stream or blocks in `folder`; None if it has none."""
    if not (folder / "manifest.json").is_file():
        return None
    manifest = read_json(folder / "manifest.json")
    splits = manifest.get("splits", {})
    return manifest.get("sha256", {name: split.get("sha256") for name, split in splits.items()})


def read_manifest(folder: Path, kind: Kind) -> dict[str, Any]:
    """Return the manifest of `folder`, which must hold a `kind` of this schema version.

    Raises:
        UserError: the manifest is missing or damaged, or has another kind or schema version. Looking up a key that it
            lacks raises UserError too.
    """
    path = folder / "manifest.json"
    remedy = f"make it with `tapernorm {'tokens' if kind == 'blocks' else kind} --out {folder} …`"
    try:
        manifest = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no {kind} in {folder}: {path.name} is missing; {remedy}") from None
    if (found := manifest.get("kind")) != kind:
        raise UserError(f"{folder} holds {found!r}, but {kind!r} is needed; {remedy}")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        version = manifest.get("schema_version")
        raise UserError(f"{path} has schema version {version!r}, but this code reads {SCHEMA_VERSION}; {remedy}")
    _require_types(manifest, path)
    return manifest


def _require_types(manifest: dict[str, Any], path: Path) -> None:
    """Check the types of a manifest's values; raise UserError if one is wrong."""
    faults = [key for key, kind in _TYPES.items() if key in manifest and not isinstance(manifest[key], kind)]
    if not faults:
        faults = [f"splits.{key}" for key, entry in manifest.get("splits", {}).items() if not isinstance(entry, dict)]
    if faults:
        raise UserError(f"{path} is damaged ({', '.join(faults)} is of the wrong type): run its job again")


def origin_of(manifest: dict[str, Any]) -> str:
    """Describe in one line the text of blocks, from their manifest: source, version and filter."""
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
    """Describe a data set of the hub, or local files by the first few names and one hash of all."""
    if "hub" in details:
        return f"{details['hub']} at {details.get('revision') or 'its newest revision'}"
    files = details["files"]
    named = [Path(file["path"]).name for file in files]
    more = f" and {len(files) - _FEW} more" if len(files) > _FEW else ""
    whole = "\n".join(file["sha256"] for file in files)
    sha256 = files[0]["sha256"] if len(files) == 1 else hashlib.sha256(whole.encode()).hexdigest()
    return f"{', '.join(named[:_FEW])}{more}, sha256 {sha256[:12]}"
