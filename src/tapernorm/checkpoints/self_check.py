"""The self-check of an export: which files it is made of, and what its model answers to fixed tokens.

B sequences, T tokens, V vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from ..architectures import context_of, logits_of, vocabulary_of
from ..util.atomic_files import sha256_of, whole_file
from ..util.errors import UserError
from ..util.rng import generator

FILE = "selfcheck.safetensors"
CARD = "README.md"  # people edit it: it is no part of the check, and its hash tells whether they did
NEW_CARD = "README.new.md"  # beside one that was edited
_SEQUENCES, _LENGTH = 4, 16
_TOLERANCE = 1e-3  # of the largest logit: float32 on two machines parts by some 1e-6 of it, a fault by about all of it


class FormFailed(UserError):
    """A form of an export does not compute what the folded model does, or nothing finite."""


@dataclass(frozen=True)
class SelfCheck:
    """What a whole export is known by."""

    files: dict[str, str]  # name -> sha256
    tokens: Tensor  # (B, T) int64
    logits: Tensor  # (B, V) float32, of the token after each sequence
    card: str | None = None  # sha256 of the model card as it was written; None: an earlier version did not say

    @classmethod
    def of(cls, folder: Path, model: nn.Module) -> Self:
        """The check of an export in `folder` that loads as `model`."""
        tokens = typical_tokens(model)
        files = {
            p.name: sha256_of(p)
            for p in sorted(folder.iterdir())
            if p.is_file() and p.name not in (FILE, CARD, NEW_CARD)
        }
        card = sha256_of(folder / CARD) if (folder / CARD).is_file() else None
        return cls(files, tokens, _last_logits(model, tokens), card)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The check that lies in `folder`."""
        path = folder / FILE
        if not path.is_file():
            raise UserError(f"{folder} holds no {FILE}: it is no export, or not all of one; export the model again")
        try:
            with safe_open(path, framework="pt") as opened:
                told = opened.metadata() or {}
                return cls(
                    json.loads(told["files"]),
                    opened.get_tensor("tokens"),
                    opened.get_tensor("logits"),
                    told.get("card"),
                )
        except (SafetensorError, KeyError, ValueError) as error:
            raise _failed(folder, f"{FILE} is damaged ({error})") from None

    def write(self, folder: Path) -> None:
        """Store the check beside the files that it vouches for."""
        told = {"files": json.dumps(self.files)} | ({} if self.card is None else {"card": self.card})
        content = to_bytes({"tokens": self.tokens, "logits": self.logits}, metadata=told)
        with whole_file(folder / FILE) as temporary:
            temporary.write_bytes(content)

    def written(self, folder: Path) -> set[str]:
        """Names of what the export in `folder` is made of; a model card that was edited since is not among them."""
        edited = (folder / CARD).is_file() and sha256_of(folder / CARD) != self.card
        return {*self.files, FILE, NEW_CARD, *(() if edited else (CARD,))}

    def require_files(self, folder: Path) -> None:
        """Raise UserError, with its name, where a file of the export is missing or not what was exported."""
        for name, digest in self.files.items():
            if not (folder / name).is_file():
                raise _failed(folder, f"{name} is missing")
            if sha256_of(folder / name) != digest:
                raise _failed(folder, f"{name} is not the file that was exported (sha256 {digest[:12]}…)")

    def require_logits(self, folder: Path, model: nn.Module) -> float:
        """The largest difference from the stored logits."""
        difference = (_last_logits(model, self.tokens) - self.logits).abs().max().item()
        allowed = _TOLERANCE * self.logits.abs().max().item()
        if not difference <= allowed:
            raise _failed(
                folder,
                f"the logits of its fixed tokens differ by {difference:.3g} from the stored ones, and rounding explains"
                f" {allowed:.3g}",
            )
        return difference


@torch.no_grad()
def typical_tokens(model: nn.Module) -> Tensor:
    """A few token ids (B, T) that the model itself draws, each sequence from another first one.

    Without norms, on random ids, logits can be of any size, and their rounding too. A sequence whose logits are not
    finite is dropped.

    Raises:
        FormFailed: that is every sequence.
    """
    draw = generator(0, "selfcheck")
    tokens = torch.randint(vocabulary_of(model), (_SEQUENCES, 1), generator=draw)
    while True:
        logits = _last_logits(model, tokens)
        finite = logits.isfinite().all(dim=1)
        if not finite.any():
            raise FormFailed(f"the model's logits are not finite after {tokens.shape[1]} tokens: train it for longer")
        tokens, logits = tokens[finite], logits[finite]
        if tokens.shape[1] >= min(_LENGTH, context_of(model)):
            return tokens
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=draw)], dim=1)


@torch.no_grad()
def _last_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    device = next(model.parameters()).device
    return logits_of(model, tokens.to(device))[:, -1].float().cpu().contiguous()


def _failed(folder: Path, why: str) -> UserError:
    return UserError(f"self-check of {folder} failed: {why}; fetch or export it again")
