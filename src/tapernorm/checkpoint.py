"""Resume checkpoints: plain tensors and numbers, written whole, verified on load, the last two kept.

A file is named step-{step}.{sha256 of its content}.pt, so that one rename publishes content and
checksum together. A checkpoint holds the fingerprint of what defines the run's numbers.
"""

import hashlib
import io
import sys
from pathlib import Path
from typing import Any

import torch

from .errors import UserError
from .files import sha256_of, whole_file

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
        """Write the state after `step` optimizer steps, then drop all but the newest two."""
        content = io.BytesIO()  # torch.save to a path hides a full disk behind a RuntimeError
        torch.save({"fingerprint": self.fingerprint, "step": step, "state": state}, content)
        checksum = hashlib.sha256(content.getbuffer()).hexdigest()
        with whole_file(self.folder / f"step-{step:08d}.{checksum[:_DIGITS]}.pt") as temporary:
            temporary.write_bytes(content.getbuffer())
        for old in self._files()[:-_KEPT]:
            old.unlink()

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """(step, state) of the newest checkpoint that is whole; a damaged one is removed, and said so.

        Raises:
            UserError: the checkpoints belong to a run with other settings or other data.
        """
        files = self._files()
        while files:
            path = files.pop()
            if sha256_of(path)[:_DIGITS] != path.name.split(".")[1]:
                instead = f"falling back to {files[-1].name}" if files else "starting anew"
                print(f"checkpoint {path} is damaged and removed; {instead}", file=sys.stderr)
                path.unlink()  # else it would count as one of the two that are kept
                continue
            saved = torch.load(path, map_location="cpu", weights_only=True)
            if saved["fingerprint"] != self.fingerprint:
                raise UserError(
                    f"{path} belongs to a run with other settings or data (fingerprint {saved['fingerprint']}, "
                    f"this run {self.fingerprint}): delete {self.folder} to start anew"
                )
            return saved["step"], saved["state"]
        return None

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))
