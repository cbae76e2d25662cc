"""The self-check of an export: the sha256 of its files, and its model's logits of fixed tokens.

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
CARD = "README.md"  # users may edit it, so it is not checked; its hash shows whether they did
NEW_CARD = "README.new.md"  # the new card beside an edited one
_SEQUENCES, _LENGTH = 4, 16
_TOLERANCE = (
    1e-3  # of the largest logit: two machines differ by about 1e-6 of it in float32, a fault by about all of it
)


class FormFailed(UserError):
    """The error for an exported form that does not compute what the folded model computes, or nothing finite."""


@dataclass(frozen=True)
class SelfCheck:
    """The recorded files, tokens and logits of an export."""

    files: dict[str, str]  # name -> sha256
    tokens: Tensor  # (B, T) int64
    logits: Tensor  # (B, V) float32, of the token after each sequence
    card: str | None = None  # sha256 of the model card as written; None in exports of an earlier version

    @classmethod
    def of(cls, folder: Path, model: nn.Module) -> Self:
        """Compute the self-check of an export in `folder` that loads as `model`."""
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
        """Read the self-check in `folder`.

        Raises:
            UserError: there is none, or it is damaged.
        """
        path = folder / FILE
        if not path.is_file():
            raise UserError(
                f"{folder} has no {FILE}: it is not an export, or an incomplete one; export the model again"
            )
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
        """Write the self-check into `folder`."""
        told = {"files": json.dumps(self.files)} | ({} if self.card is None else {"card": self.card})
        content = to_bytes({"tokens": self.tokens, "logits": self.logits}, metadata=told)
        with whole_file(folder / FILE) as temporary:
            temporary.write_bytes(content)

    def written(self, folder: Path) -> set[str]:
        """Return the names of the files of the export in `folder`, without a model card that was edited since."""
        edited = (folder / CARD).is_file() and sha256_of(folder / CARD) != self.card
        return {*self.files, FILE, NEW_CARD, *(() if edited else (CARD,))}

    def require_files(self, folder: Path) -> None:
        """Raise UserError if a file of the export is missing or has changed."""
        for name, digest in self.files.items():
            if not (folder / name).is_file():
                raise _failed(folder, f"{name} is missing")
            if sha256_of(folder / name) != digest:
                raise _failed(folder, f"{name} has changed since the export (its sha256 was {digest[:12]}…)")

    def require_logits(self, folder: Path, model: nn.Module) -> float:
        """Return the largest difference between the model's logits of the fixed tokens and the stored ones.

        Raises:
            UserError: the difference is larger than rounding explains.
        """
        difference = (_last_logits(model, self.tokens) - self.logits).abs().max().item()
        allowed = _TOLERANCE * self.logits.abs().max().item()
        if not difference <= allowed:
            raise _failed(
                folder,
                f"the logits of the fixed tokens differ by {difference:.3g} from the stored ones, and rounding "
                f"explains {allowed:.3g}",
            )
        return difference


@torch.no_grad()
def typical_tokens(model: nn.Module) -> Tensor:
    """Sample token ids (B, T) from the model itself, each sequence from another first token.

    Random ids would not do: without norms, their logits can be of any size, and so can the rounding. A sequence whose
    logits are not finite is dropped.

    Raises:
        FormFailed: no sequence has finite logits.
    """
    draw = generator(0, "selfcheck")
    tokens = torch.randint(vocabulary_of(model), (_SEQUENCES, 1), generator=draw)
    while True:
        logits = _last_logits(model, tokens)
        finite = logits.isfinite().all(dim=1)
        if not finite.any():
            raise FormFailed(f"the model's logits are not finite after {tokens.shape[1]} tokens: train for more steps")
        tokens, logits = tokens[finite], logits[finite]
        if tokens.shape[1] >= min(_LENGTH, context_of(model)):
            return tokens
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=draw)], dim=1)


@torch.no_grad()
def _last_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    device = next(model.parameters()).device
    return logits_of(model, tokens.to(device))[:, -1].float().cpu().contiguous()


def _failed(folder: Path, why: str) -> UserError:
    return UserError(f"the self-check of {folder} failed: {why}; fetch or export the model again")
