"""GPT-2's own byte-level BPE, taken as published: 50,257 ids, the last of them the end of a document.

The published tokenizer turns the literal text `<|endoftext|>` into that id. Here it is text like any other, so that
no document can end another.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapernorm.util.atomic_files import sha256_of, whole_file, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest
from tapernorm.util.provenance import provenance

from ..config.jobs import BpeJob
from .manifest import SCHEMA_VERSION, read_manifest
from .tokenizers import GPT2_BPE, backend_of
from .train_sentencepiece import EOD

VOCAB_SIZE = 50_257
_FILE = "tokenizer.json"
_PROBE = "Hello world"
_PROBE_IDS = [15496, 995]
_ODD = " \t\r\n\n  \x00\x85\u2028naïve 中 👩‍👩‍👧 e\u0301 \u2581" + EOD + " don't"


class BpeTokenizer:
    """The tokenizer that `save_bpe` wrote into a folder; the interface of `coders.Coder`.

    Raises:
        UserError: the folder holds no such tokenizer, or not the one that its manifest describes.
    """

    manifest: dict[str, Any]
    vocab_size: int
    eod: int

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder, "tokenizer")
        self._tokenizer = backend_of(folder / _FILE, self.manifest, "run `tapernorm tokenizer` again")
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.eod = self.manifest["eod"]

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without an end-of-document id."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [encoded.ids for encoded in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` stand for; ids that end inside a character give U+FFFD there.

        Raises:
            IndexError: an id is outside the vocabulary.
        """
        ids = list(ids)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise IndexError(f"ids run from {min(ids)} to {max(ids)} and the vocabulary to {self.vocab_size - 1}")
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def save_bpe(job: BpeJob, out: Path) -> dict[str, Any]:
    """Write the published tokenizer that `job` names, a hub name or a folder, into `out`; returns its manifest.

    Its files load in `transformers` too. They are always loaded by name or folder: given the names of its two original
    files instead, `transformers` makes a tokenizer without a vocabulary and says nothing.

    Raises:
        UserError: it cannot be loaded, or it is not GPT-2's. Nothing half-written is left.
    """
    from transformers import GPT2Tokenizer

    try:
        loaded = GPT2Tokenizer.from_pretrained(job.source)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot load the tokenizer {job.source!r} ({error}). Without a network, copy its folder (vocab.json and "
            "merges.txt, or tokenizer.json) from a machine that has one, and name that folder in gpt2.bpe"
        ) from error
    if len(loaded) != VOCAB_SIZE:
        raise UserError(
            f"the tokenizer {job.source!r} has {len(loaded)} entries and GPT-2's {VOCAB_SIZE}: it is another one, "
            "or its folder lacks vocab.json or merges.txt"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loaded.save_pretrained(folder)
        files = sorted(path.name for path in folder.iterdir() if path.is_file())
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "kind": "tokenizer",
            "vocab_size": VOCAB_SIZE,
            "model_type": GPT2_BPE,
            "eod": loaded.convert_tokens_to_ids(EOD),
            "source": job.source,
            "sha256": sha256_of(folder / _FILE),
            "files": {file: sha256_of(folder / file) for file in files},
            "provenance": provenance(config_hash=digest(job)),
        }
        write_json(folder / "manifest.json", manifest)
        _require_lossless(BpeTokenizer(folder), job.source)
        for file in [*files, "manifest.json"]:
            with whole_file(out / file) as copy:
                copy.write_bytes((folder / file).read_bytes())
    return manifest


def _require_lossless(coder: BpeTokenizer, source: str) -> None:
    ids, odd = coder.encode(_PROBE), coder.encode(_ODD)
    if coder.eod != VOCAB_SIZE - 1 or ids != _PROBE_IDS or coder.decode(odd) != _ODD or coder.eod in odd:
        raise UserError(
            f"the tokenizer {source!r} is not GPT-2's: {_PROBE!r} gives {ids} for {_PROBE_IDS}, {EOD} has id "
            f"{coder.eod} for {VOCAB_SIZE - 1}, and {_ODD!r} comes back as {coder.decode(odd)!r}"
        )
