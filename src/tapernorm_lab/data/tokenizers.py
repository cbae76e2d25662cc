"""The interface that every kind of tokenizer has, and what opens a tokenizer folder of any kind."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tapernorm.util.atomic_files import sha256_of
from tapernorm.util.errors import UserError

from .manifest import read_manifest

GPT2_BPE, HUB = "gpt2_bpe", "hub"  # a manifest's model_type; any other is SentencePiece's


class Coder(Protocol):
    """Text to ids and back, without loss."""

    manifest: dict[str, Any]
    vocab_size: int  # ids are 0 .. vocab_size - 1
    eod: int  # id of the end of a document; no text encodes to it, and it decodes to nothing

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def piece_of(coder: Coder, row: Sequence[int], position: int) -> str:
    """The text that one token adds to those before it; `<end>` for the end of a document, which adds none."""
    if row[position] == coder.eod:
        return "<end>"
    return coder.decode(row[: position + 1])[len(coder.decode(row[:position])) :] or coder.decode([row[position]])


def open_tokenizer(folder: Path) -> Coder:
    """The tokenizer that `train_tokenizer`, `save_bpe` or `save_hub_tokenizer` wrote into a folder.

    Raises:
        UserError: the folder holds no tokenizer, or its files are not those that its manifest describes.
    """
    model_type = read_manifest(folder, "tokenizer")["model_type"]
    if model_type == GPT2_BPE:
        from .bpe import BpeTokenizer

        return BpeTokenizer(folder)
    if model_type == HUB:
        from .hf_tokenizer import HubTokenizer

        return HubTokenizer(folder)
    from .sentencepiece import Tokenizer

    return Tokenizer(folder)


def backend_of(path: Path, manifest: Mapping[str, Any], remedy: str) -> Any:
    """The `tokenizers.Tokenizer` in a file: it encodes all of a text, and the literal text of a special token as text.

    Truncation and padding that the file was saved with are switched off.

    Raises:
        UserError: the file is not the one that the manifest describes, or no tokenizer.
    """
    from tokenizers import Tokenizer

    if not path.is_file() or sha256_of(path) != manifest["sha256"]:
        raise UserError(f"{path} is missing or is not what its manifest describes; {remedy}")
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises no other type
        raise UserError(f"{path} is no tokenizer ({error}); {remedy}") from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend
