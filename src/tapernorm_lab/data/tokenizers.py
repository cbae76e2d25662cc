"""The interface of all tokenizers, and the function that opens a tokenizer folder of any kind."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from .manifest import GPT2_BPE, HUB, read_manifest


class Coder(Protocol):
    """A lossless map from text to ids and back."""

    manifest: dict[str, Any]
    vocab_size: int  # ids are 0 .. vocab_size - 1
    eod: int  # id of the end of a document; no text encodes to it, and it decodes to nothing

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def piece_of(coder: Coder, row: Sequence[int], position: int) -> str:
    """Return the text that one token adds to the tokens before it; `<end>` for the end of a document."""
    if row[position] == coder.eod:
        return "<end>"
    return coder.decode(row[: position + 1])[len(coder.decode(row[:position])) :] or coder.decode([row[position]])


def open_tokenizer(folder: Path) -> Coder:
    """Open the tokenizer that `train_tokenizer`, `save_bpe` or `save_hub_tokenizer` wrote into a folder.

    Raises:
        UserError: the folder holds no tokenizer, or its files differ from its manifest.
    """
    model_type = read_manifest(folder, "tokenizer")["model_type"]
    if model_type in (GPT2_BPE, HUB):
        from .hf_tokenizer import HFTokenizer

        return HFTokenizer(folder)
    from .sentencepiece import Tokenizer

    return Tokenizer(folder)
