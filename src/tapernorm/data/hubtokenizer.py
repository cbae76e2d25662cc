"""The tokenizer that belongs to a model of transformers, as a `Coder`: any that comes as one tokenizer.json.

A document is what the tokenizer itself makes of a text, its own beginning-of-text id included; the literal text of a
special token is text. Documents end with the end-of-text id, or with the beginning-of-text id of a tokenizer that has
no other.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import sha256_of, whole_file, write_json
from ..ggufmodel import is_gguf, tokenizer_of_gguf
from ..identity import digest
from ..provenance import provenance
from .coders import HUB
from .manifest import SCHEMA_VERSION, read_manifest

_FILE = "tokenizer.json"


class HubTokenizer:
    """The tokenizer that `save_hub_tokenizer` wrote into a folder; the interface of `coders.Coder`.

    Raises:
        UserError: the folder holds no such tokenizer, or not the one that its manifest describes.
    """

    manifest: dict[str, Any]
    vocab_size: int  # the model's, which may have ids to spare
    eod: int

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.manifest = read_manifest(folder, "tokenizer")
        path = folder / _FILE
        if not path.is_file() or sha256_of(path) != self.manifest["sha256"]:
            raise UserError(
                f"{path} is missing or is not what its manifest describes; delete {folder} and run it again"
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = self.manifest["vocab_size"]
        self.eod = self.manifest["eod"]

    def encode(self, text: str) -> list[int]:
        """Ids of one text as the tokenizer marks it, without the end-of-document id at either end."""
        return self._bare(self._tokenizer.encode(text).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self._bare(encoded.ids) for encoded in self._tokenizer.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` stand for; special tokens give none."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _bare(self, ids: list[int]) -> list[int]:
        first = 1 if ids and ids[0] == self.eod else 0
        last = len(ids) - 1 if len(ids) > first and ids[-1] == self.eod else len(ids)
        return ids[first:last]


def save_hub_tokenizer(source: Path, out: Path, *, vocab_size: int) -> dict[str, Any]:
    """Write the tokenizer of the model in `source`, a folder or a GGUF file, into `out`; returns its manifest.

    Args:
        vocab_size: the model's.

    Raises:
        UserError: there is none, it has no tokenizer.json form or no id that can end a document, or it has ids that the
            model has not. Nothing half-written is left.
    """
    loaded = _load(source)
    eod = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.bos_token_id
    if eod is None:
        raise UserError(
            f"the tokenizer in {source} has no end-of-text token: name one as eos_token in its tokenizer_config.json"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loaded.save_pretrained(folder)
        if not (folder / _FILE).is_file():
            raise UserError(f"the tokenizer in {source} has no tokenizer.json: save its fast form there")
        if len(loaded) > vocab_size:
            raise UserError(f"the tokenizer in {source} has {len(loaded)} ids and the model {vocab_size}: they differ")
        files = sorted(path.name for path in folder.iterdir() if path.is_file())
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "kind": "tokenizer",
            "vocab_size": vocab_size,
            "model_type": HUB,
            "eod": eod,
            "source": str(source),
            "sha256": sha256_of(folder / _FILE),
            "files": {file: sha256_of(folder / file) for file in files},
            "provenance": provenance(config_hash=digest({"source": str(source)})),
        }
        for file in files:
            with whole_file(out / file) as copy:
                copy.write_bytes((folder / file).read_bytes())
        write_json(out / "manifest.json", manifest)
    return manifest


def _load(source: Path) -> Any:
    if is_gguf(source):
        return tokenizer_of_gguf(source)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"no tokenizer in {source} ({reason}): put its tokenizer.json there") from None
