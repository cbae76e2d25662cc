"""Resume checkpoints: plain tensors and numbers, written atomically and verified on load. The last two are kept.

A file is named step-{step}.{sha256 of its content}.pt, so that one rename publishes content and checksum together. A
checkpoint holds the fingerprint of the settings and data that define the run's numbers. It is streamed to disk and
memory-mapped on load, because the optimizer's state may be larger than the free memory.
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

_DIGITS = 16  # hexadecimal digits of the sha256 in a file name
_KEPT = 2  # checkpoints that are kept


class Checkpoints:
    """The checkpoints of one run in `folder`.

    Args:
        folder: where the files lie.
        fingerprint: digest of everything that defines the run's numbers; a checkpoint with another one is refused.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder = folder
        self.fingerprint = fingerprint

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state after `step` optimizer steps, then delete all but the newest two checkpoints.

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
        """Return the newest undamaged checkpoint, or None; remove damaged ones with a warning."""
        files = self._files()
        while files:
            path = files.pop()
            if sha256_of(path)[:_DIGITS] == path.name.split(".")[1]:
                return path
            instead = f"falling back to {files[-1].name}" if files else "starting anew"
            print(f"checkpoint {path} is damaged and removed; {instead}", file=sys.stderr)
            path.unlink()  # otherwise it would count as one of the two that are kept
        return None

    def load(self, path: Path) -> tuple[int, dict[str, Any]]:
        """Return (step, state) of the checkpoint that `latest` found; its tensors are views of the file.

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
    """A file for `torch.save` that hashes its content.

    PyTorch writes from C++, which replaces an error of the file by an uninformative one. The first error is therefore
    kept and raised at the end, and later writes are dropped.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None
        self._error: OSError | None = None

    @contextmanager
    def to(self, path: Path) -> Iterator[None]:
        """Write to `path` inside a `with` block.

        Raises:
            OSError: the file cannot be written.
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
        """Do nothing; `torch.save` requires this method."""

    def hexdigest(self) -> str:
        """Return the SHA-256 of everything that was written."""
        return self._hash.hexdigest()
