"""Resume checkpoints: plain tensors and numbers, written whole, verified on load, the last two kept.

A file is named step-{step}.{sha256 of its content}.pt, so that one rename publishes content and
checksum together. A checkpoint holds the fingerprint of what defines the run's numbers. It streams to the
disk and is mapped from there: the optimizer's state may be larger than the memory that is left.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tapernorm.util.atomic_files import sha256_of, whole_file
from tapernorm.util.errors import UserError

from .run_lock import require_folders

_DIGITS = 16  # of the sha256 that a file name carries
_KEPT = 2


class Checkpoints:
    """The checkpoints of one run in `folder`.

    Args:
        fingerprint: digest of everything that defines the run's numbers; others never load.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder = folder
        self.fingerprint = fingerprint

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state after `step` optimizer steps, then drop all but the newest two.

        Raises:
            UserError: the run folder was deleted or moved since this process locked it, or the disk is full.
        """
        require_folders()
        written: Any = HashedWriter()

        def named() -> Path:
            return self.folder / f"step-{step:08d}.{written.hexdigest()[:_DIGITS]}.pt"

        with whole_file(self.folder / f"step-{step:08d}.pt", named) as temporary, written.to(temporary):
            torch.save({"fingerprint": self.fingerprint, "step": step, "state": state}, written)
        for old in self._files()[:-_KEPT]:
            old.unlink()

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole; a damaged one is removed, and said so."""
        files = self._files()
        while files:
            path = files.pop()
            if sha256_of(path)[:_DIGITS] == path.name.split(".")[1]:
                return path
            instead = f"falling back to {files[-1].name}" if files else "starting anew"
            print(f"checkpoint {path} is damaged and removed; {instead}", file=sys.stderr)
            path.unlink()  # else it would count as one of the two that are kept
        return None

    def load(self, path: Path) -> tuple[int, dict[str, Any]]:
        """(step, state) of the checkpoint that `latest` found; its tensors are views of the file.

        Raises:
            UserError: it belongs to a run with other settings or other data.
        """
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if saved["fingerprint"] != self.fingerprint:
            raise UserError(
                f"{path} belongs to a run with other settings or data (fingerprint {saved['fingerprint']}, "
                f"this run {self.fingerprint}): delete {self.folder} to start anew"
            )
        return saved["step"], saved["state"]

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))


class HashedWriter:
    """A file for `torch.save` that hashes what passes through it.

    PyTorch writes from C++, which turns an error of the file into one of its own that no longer says what
    was wrong. The first error is therefore kept, what follows it is dropped, and it is raised at the end.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None
        self._error: OSError | None = None

    @contextmanager
    def to(self, path: Path) -> Iterator[None]:
        """Write to `path` while inside.

        Raises:
            OSError: what kept the file from being written.
        """
        with open(path, "wb") as self._file:
            yield
            if self._error is not None:
                raise self._error

    def write(self, content: memoryview) -> int:
        if self._error is None:
            try:
                self._write(content)
            except OSError as error:
                self._error = error
        return len(content)

    def _write(self, content: memoryview) -> None:
        assert self._file is not None
        self._file.write(content)
        self._hash.update(content)

    def flush(self) -> None:
        """Nothing to do before the file is closed; `torch.save` wants it there."""

    def hexdigest(self) -> str:
        """SHA-256 of all that was written."""
        return self._hash.hexdigest()
