"""Where scored rows come from, in words, by their manifest."""

from typing import Any


def origin_of(manifest: dict[str, Any]) -> str:
    """One line about the text behind blocks: source, version, what was filtered; from the manifest of the blocks."""
    details = manifest["details"]
    named = [_text(source["source"], source["details"]) for source in details.get("sources", [])]
    named += [str(details["hub"])] if "hub" in details else []  # rows that came tokenized
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
    if "hub" in details:
        return f"{details['hub']} at {details.get('revision', 'its newest revision')}"
    return ", ".join(f"{file['path']} (sha256 {file['sha256'][:12]})" for file in details["files"])
