"""The running Python's own standard library as text: a file is a document, in an order and in halves drawn by hash.

The hash is that of the text, so that files of equal text stand in one half; salted, so that it is independent of the
one that divides a corpus. In its order any first n documents are a sample of the library. The library's tests are left
out, as many distributions of Python do.
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
    details: dict[str, Any]  # for a manifest: which Python's, how much, what was skipped, one hash of the whole

    def documents(self) -> Iterator[str]:
        """The text of each file, one in memory at a time."""
        for path in self.files:
            yield _decoded(path.read_bytes())


def standard_library(part: Part | None, root: Path | None = None) -> Library:
    """The library under `root`, by default the running Python's; `part` takes half of its files, None all.

    A file is decoded as its own first lines say (PEP 263). One that cannot be, or that holds half a surrogate pair, is
    skipped and named. Links are no files of the library.
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
    """Source text as PEP 263 says: by its byte order mark or coding line, UTF-8 without either; newlines untouched."""
    lines = iter(raw.splitlines(keepends=True))
    encoding, _ = tokenize.detect_encoding(lambda: next(lines, b""))
    return raw.decode(encoding)
