"""Resume checkpoints: plain tensors and numbers, written whole, verified on load, the last two kept.

A file is named step-{step}.{sha256 of its content}.pt, so that one rename publishes content and
checksum together. A checkpoint holds the fingerprint of what defines the run's numbers.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from .errors import UserError
from .files import sha256_of, sync_folder, whole_file

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
        draft = self.folder / "draft.pt"
        with whole_file(draft) as temporary:
            torch.save({"fingerprint": self.fingerprint, "step": step, "state": state}, temporary)
        os.replace(draft, self.folder / f"step-{step:08d}.{sha256_of(draft)[:_DIGITS]}.pt")
        sync_folder(self.folder)
        for old in self._files()[:-_KEPT]:
            old.unlink()

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """(step, state) of the newest checkpoint that is whole; a damaged one is passed over, and said so.

        Raises:
            UserError: the checkpoints belong to a run with other settings or other data.
        """
        for path in reversed(self._files()):
            if sha256_of(path)[:_DIGITS] != path.name.split(".")[1]:
                print(f"checkpoint {path} is damaged; falling back to the one before it", file=sys.stderr)
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
