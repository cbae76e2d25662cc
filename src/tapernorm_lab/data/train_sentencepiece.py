"""One SentencePiece training run that loses no document, says so from the trainer's own log, and prints nothing.

Left to its defaults the trainer skips every sentence over 4192 bytes, and always those that hold U+2585, with no more
than a line in its log. Here the limit is its largest, text is cut at U+2585 (which then falls back to bytes), and the
number of sentences that the trainer says it loaded must be the number it was given.
"""

import io
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from tapernorm.util.errors import UserError

from ..config.sections import TokenizerConfig

EOD = "<|endoftext|>"
MAX_DOCUMENT_BYTES = 1 << 30  # the largest max_sentence_length that SentencePiece takes
_RESERVED = "\u2585"  # SentencePiece's mark for an unknown character
_UNK, _EOD = 0, 1  # ids
_ERRORS_ONLY = 2  # absl log severity


@dataclass(frozen=True)
class Trained:
    """A trained model and what it was trained on."""

    model: bytes  # SentencePiece ModelProto
    eod: int  # id of EOD, a control piece: no text encodes to it
    documents: int


class _Sentences:
    """Documents as SentencePiece takes them, counted as they pass."""

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
    """Train on every document, on one thread: the same documents give the same bytes.

    Raises:
        UserError: the vocabulary is too large or too small for the text (with the nearest that fits), or the trainer
            did not load every document.
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
                    minloglevel=0,  # its log is evidence here, and goes nowhere else
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
            f"SentencePiece trained on {loaded} of {sentences.given} pieces of text: it leaves out documents over "
            f"{MAX_DOCUMENT_BYTES} bytes; split the long ones"
        )
    return Trained(model.getvalue(), _EOD, sentences.documents)


def _explained(error: RuntimeError, settings: TokenizerConfig) -> RuntimeError | UserError:
    message = str(error)
    if found := re.search(r"Vocabulary size too high \(\d+\).*<= (\d+)", message):
        return UserError(
            f"tokenizer.vocab_size {settings.vocab_size} is too large for this corpus: "
            f"the largest that fits is {found[1]}; lower it, or add text"
        )
    if found := re.search(r"Vocabulary size is smaller than required_chars. \d+ vs (\d+)", message):
        return UserError(
            f"tokenizer.vocab_size {settings.vocab_size} is too small for the characters of this corpus: "
            f"the smallest that fits is {found[1]}; raise it"
        )
    return error


def _sentences_loaded(log: BinaryIO) -> int | None:
    log.seek(0)
    for line in log:
        if found := re.search(rb"Loaded all (\d+) sentences", line):
            return int(found[1])
    return None


@contextmanager
def _stderr_into(file: BinaryIO) -> Iterator[None]:
    """Send what native code writes to standard error into `file`; it does not go through sys.stderr."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
