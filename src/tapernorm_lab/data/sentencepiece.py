"""A lossless SentencePiece tokenizer: decode(encode(text)) == text for any text, with one end-of-document id.

Characters outside the vocabulary are encoded as bytes, and text is not normalised. The only exception is U+2581,
SentencePiece's own mark for a space. It is counted and, depending on the setting, refused.

By default SentencePiece's trainer skips sentences over 4192 bytes or with U+2585, and only logs it. Here the limit is
the largest possible, and text is cut at U+2585. The number of sentences in its log must equal the number given to it.
"""

import hashlib
import heapq
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tapernorm.util.atomic_files import sha256_of, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest

from ..config.jobs import TokenizerJob
from ..config.sections import TokenizerConfig
from .corpus import SPLITS, read_documents
from .manifest import made_manifest, read_manifest, whole_files

SPACE_MARK = "\u2581"
EOD = "<|endoftext|>"
MAX_DOCUMENT_BYTES = 1 << 30  # the largest max_sentence_length that SentencePiece takes
_RESERVED = "\u2585"  # SentencePiece's mark for an unknown character
_UNK, _EOD = 0, 1  # ids
_ERRORS_ONLY = 2  # absl log severity


class Tokenizer:
    """The tokenizer that `train_tokenizer` wrote into a folder."""

    manifest: dict[str, Any]
    vocab_size: int  # ids are 0 .. vocab_size - 1
    eod: int  # id of the end of a document; no text encodes to it, and it decodes to nothing

    def __init__(self, folder: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self.manifest = read_manifest(folder, "tokenizer")
        path = folder / "tokenizer.model"
        if not path.is_file() or sha256_of(path) != self.manifest["sha256"]:
            raise UserError(f"{path} is missing or differs from its manifest; train the tokenizer again")
        self._processor = SentencePieceProcessor(model_proto=path.read_bytes())
        self._refuses_mark = self.manifest["literal_u2581"]["policy"] == "refuse"
        self.vocab_size = self._processor.vocab_size()
        self.eod = self._processor.piece_to_id(EOD)

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without an end-of-document id. Raises as `encode_batch`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without end-of-document ids.

        Raises:
            UserError: a text holds U+2581, which this tokenizer refuses.
            UnicodeEncodeError: a text holds half a surrogate pair, which UTF-8 cannot encode.
        """
        if self._refuses_mark:
            refuse_marks(sum(text.count(SPACE_MARK) for text in texts), "the text to encode")
        return self._processor.encode([text.encode("utf-8") for text in texts], num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return self._processor.decode(list(ids))


def train_tokenizer(job: TokenizerJob, corpus: Path, out: Path) -> dict[str, Any]:
    """Train on the training split of `corpus`, write the tokenizer into `out`, and return its manifest.

    The same settings and corpus give the same bytes. SentencePiece holds its whole training text in memory.

    Raises:
        UserError: the corpus holds U+2581, which the settings refuse. The vocabulary size does not fit the corpus, or
            SentencePiece would skip a document.
    """
    settings = job.tokenizer
    corpus_manifest = read_manifest(corpus, "corpus")
    if corpus_manifest["splits"]["train"]["documents"] == 0:
        raise UserError(f"{corpus} has no training document to train a tokenizer on; lower data.valid_fraction")
    paths = {split: corpus / f"{split}.jsonl" for split in SPLITS}
    marks = {split: sum(text.count(SPACE_MARK) for text in read_documents(path)) for split, path in paths.items()}
    if settings.literal_u2581 == "refuse":
        refuse_marks(sum(marks.values()), str(corpus))
    trained = fit(settings, sample(paths["train"], settings.max_documents))
    with whole_files(out, "tokenizer.model") as files:
        files["tokenizer.model"].write_bytes(trained.model)
        manifest = made_manifest(
            "tokenizer",
            config_hash=digest(job),
            vocab_size=settings.vocab_size,
            model_type=settings.model_type,
            eod=trained.eod,
            documents={
                "in_corpus": corpus_manifest["splits"]["train"]["documents"],
                "trained_on": trained.documents,
                "drawn": "all" if settings.max_documents is None else "smallest sha256 over the whole split",
            },
            literal_u2581={"policy": settings.literal_u2581, "count": marks},
            sha256=hashlib.sha256(trained.model).hexdigest(),
            corpus_sha256={split: corpus_manifest["splits"][split]["sha256"] for split in SPLITS},
        )
        write_json(files["manifest.json"], manifest)
    return manifest


def sample(jsonl: Path, limit: int | None) -> Iterator[str]:
    """Return all documents, or the `limit` documents of smallest salted sha256, in the order of the file."""
    if limit is None:
        return read_documents(jsonl)
    ranks = ((hashlib.sha256(b"tokenizer/" + t.encode()).digest(), i) for i, t in enumerate(read_documents(jsonl)))
    chosen = {position for _, position in heapq.nsmallest(limit, ranks)}
    return (text for position, text in enumerate(read_documents(jsonl)) if position in chosen)


def refuse_marks(count: int, where: str) -> None:
    """Raise UserError if `where` holds U+2581, `count` times."""
    if count:
        raise UserError(
            f"{where} holds the character U+2581 {count} times, which would decode to a space: replace it in the "
            "text, or accept the space with tokenizer.literal_u2581: as_space"
        )


@dataclass(frozen=True)
class Trained:
    """A trained model."""

    model: bytes  # SentencePiece ModelProto
    eod: int  # id of EOD, a control piece: no text encodes to it
    documents: int  # number of documents that it was trained on


class _Sentences:
    """Iterate over documents as sentences for SentencePiece, and count both."""

    def __init__(self, documents: Iterable[str]) -> None:
        self._documents = documents
        self.documents = 0
        self.given = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._documents:
            self.documents += 1
            for sentence in text.split(_RESERVED):
                if sentence.rstrip("\r\n"):  # the wrapper strips these at the end of a sentence
                    self.given += 1
                    yield sentence


def fit(settings: TokenizerConfig, documents: Iterable[str]) -> Trained:
    """Train on every document, on one thread, so that the same documents give the same bytes.

    Raises:
        UserError: there is no text, the vocabulary size does not fit it, or SentencePiece skipped some of it.
    """
    from sentencepiece import SentencePieceTrainer, set_min_log_level

    model, sentences = io.BytesIO(), _Sentences(documents)
    with tempfile.TemporaryFile() as log:
        try:
            with _stderr_into(log):
                SentencePieceTrainer.train(
                    sentence_iterator=iter(sentences),
                    model_writer=model,
                    model_type=settings.model_type,
                    vocab_size=settings.vocab_size,
                    byte_fallback=True,
                    normalization_rule_name="identity",
                    add_dummy_prefix=False,
                    remove_extra_whitespaces=False,
                    max_sentence_length=MAX_DOCUMENT_BYTES,
                    unk_id=_UNK,
                    eos_id=_EOD,
                    eos_piece=EOD,
                    bos_id=-1,
                    pad_id=-1,
                    num_threads=1,
                    minloglevel=0,  # `_sentences_loaded` reads the log
                )
        except RuntimeError as error:
            if not sentences.given:
                raise UserError("there is no text to train a tokenizer on: build the corpus again") from error
            raise _explained(error, settings) from error
        finally:
            set_min_log_level(_ERRORS_ONLY)
        loaded = _sentences_loaded(log)
    if loaded != sentences.given:
        raise UserError(
            f"SentencePiece trained on {loaded} of {sentences.given} pieces of text: split documents over "
            f"{MAX_DOCUMENT_BYTES} bytes"
        )
    return Trained(model.getvalue(), _EOD, sentences.documents)


def _explained(error: RuntimeError, settings: TokenizerConfig) -> RuntimeError | UserError:
    size = f"tokenizer.vocab_size {settings.vocab_size}"
    if found := re.search(r"Vocabulary size too high \(\d+\).*<= (\d+)", str(error)):
        return UserError(
            f"{size} is too large for this corpus: the largest that fits is {found[1]}; lower it, or add text"
        )
    if found := re.search(r"Vocabulary size is smaller than required_chars. \d+ vs (\d+)", str(error)):
        return UserError(
            f"{size} is too small for the characters of this corpus: the smallest that fits is {found[1]}; raise it"
        )
    return error


def _sentences_loaded(log: BinaryIO) -> int | None:
    log.seek(0)
    found = re.search(rb"Loaded all (\d+) sentences", log.read())
    return None if found is None else int(found[1])


@contextmanager
def _stderr_into(file: BinaryIO) -> Iterator[None]:
    """Redirect the standard error of native code, which bypasses sys.stderr, into `file`."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
