"""Where scored rows come from, in words, by their manifest."""

import hashlib
from pathlib import Path
from typing import Any

_FEW = 3  # files that are named


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
