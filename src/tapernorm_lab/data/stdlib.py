"""The standard library of the running Python as text: one document per file, ordered and halved by a hash.

The hash is that of the text, so that files of equal text lie in the same half. It is salted, so that it is independent
of the hash that splits a corpus. The first n documents in this order are a random sample of the library. The library's
tests are left out, because many distributions of Python leave them out too.
"""

import hashlib
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tapernorm.util.errors import UserError, setting

Part = Literal["first", "second"]

_SALT = b"python_stdlib/"
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TESTS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True)
class Library:
    """The files of a library, or of a half of it, in the order of their hashes."""

    files: tuple[Path, ...]
    details: dict[str, Any]  # for a manifest: Python version, number of files, skipped files, one hash of all

    def documents(self) -> Iterator[str]:
        """Yield the text of each file, with one in memory at a time."""
        for path in self.files:
            yield _decoded(path.read_bytes())


def standard_library(part: Part | None, root: Path | None = None) -> Library:
    """Return the library under `root`, by default the running Python's; `part` selects half of its files, None all.

    A file is decoded as its first lines declare (PEP 263). A file that cannot be decoded, or that holds half a
    surrogate pair, is skipped and listed. Symbolic links are ignored.

    Raises:
        UserError: there is no source file under `root`.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    whole = hashlib.sha256()
    found: list[tuple[bytes, str, Path]] = []
    skipped: list[str] = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if (_NOT_LIBRARY | _TESTS).intersection(name.split("/")[:-1]) or path.is_symlink() or not path.is_file():
            continue
        raw = path.read_bytes()
        try:
            text = _decoded(raw).encode("utf-8")
        except (SyntaxError, UnicodeError, LookupError):
            skipped.append(name)
            continue
        whole.update(f"{name} {hashlib.sha256(raw).hexdigest()}\n".encode())
        found.append((hashlib.sha256(_SALT + text).digest(), name, path))
    if not found:
        raise UserError(
            f"{root} holds no .py file; use a Python that ships its library as source, or another "
            f"{setting('data.source')}"
        )
    files = tuple(path for digest, _, path in sorted(found) if part is None or part == _half(digest))
    details = {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "part": part,
        "files": len(files),
        "library": {"files": len(found), "sha256": whole.hexdigest(), "skipped": skipped},
        "left_out": sorted(_TESTS),
    }
    return Library(files, details)


def _half(digest: bytes) -> Part:
    return "first" if digest[0] < 128 else "second"


def _decoded(raw: bytes) -> str:
    """Decode source text as PEP 263 says: by its byte order mark or coding line, else as UTF-8. Newlines stay."""
    lines = iter(raw.splitlines(keepends=True))
    encoding, _ = tokenize.detect_encoding(lambda: next(lines, b""))
    return raw.decode(encoding)
