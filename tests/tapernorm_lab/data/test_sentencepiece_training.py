import re
import sys

import pytest
from sentencepiece import SentencePieceProcessor

from tapernorm.util.errors import UserError
from tapernorm_lab.config.sections import TokenizerConfig
from tapernorm_lab.data import sentencepiece as piecetrainer
from tapernorm_lab.data.sentencepiece import EOD, fit

PROSE = [
    f"The {noun} saw a {other}.\nIt ran away." for noun in ("cat", "dog", "owl") for other in ("fox", "hen", "bee")
]


def settings(vocab_size: int = 300, model_type: str = "bpe") -> TokenizerConfig:
    return TokenizerConfig.model_validate(
        {"vocab_size": vocab_size, "model_type": model_type, "max_documents": None, "literal_u2581": "refuse"}
    )


def pieces(model: bytes) -> list[str]:
    processor = SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(processor.vocab_size())]


def test_ids_are_unknown_end_of_document_bytes_then_pieces() -> None:
    trained = fit(settings(), PROSE)
    processor = SentencePieceProcessor(model_proto=trained.model)
    assert pieces(trained.model)[:258] == ["<unk>", EOD, *(f"<0x{byte:02X}>" for byte in range(256))]
    assert (trained.eod, trained.documents) == (1, len(PROSE))
    assert processor.is_control(trained.eod)
    assert processor.vocab_size() == 300


def test_newlines_are_learned_like_other_characters() -> None:
    assert any("\n" in piece for piece in pieces(fit(settings(), PROSE).model))
    assert not any(
        "\n" in piece for piece in pieces(fit(settings(), [text.replace("\n", " ") for text in PROSE]).model)
    )


def test_a_document_far_over_4192_bytes_is_learned_from() -> None:
    long = "zyzzyva " * 2000
    assert "▁zyzzyva" in pieces(fit(settings(), [*PROSE, long]).model)
    assert "▁zyzzyva" not in pieces(fit(settings(), PROSE).model)


def test_a_document_that_the_trainer_would_skip_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecetrainer, "MAX_DOCUMENT_BYTES", 4192)  # the trainer's default
    with pytest.raises(UserError, match=r"trained on 9 of 10 pieces of text: .* over 4192 bytes"):
        fit(settings(), [*PROSE, "zyzzyva " * 2000])


def test_documents_that_hold_reserved_characters_are_learned_from() -> None:
    odd = ["zyzzyva \u2585 zyzzyva\u2585", "zyzzyva\x00 zyzzyva\t", f"zyzzyva {EOD} zyzzyva <unk> <0x41>"] * 5
    trained = fit(settings(), [*PROSE, *odd, "\u2585", "\n\n"])
    assert "▁zyzzyva" in pieces(trained.model)
    assert trained.documents == len(PROSE) + len(odd) + 2


def test_a_lost_log_line_counts_as_a_lost_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecetrainer, "_sentences_loaded", lambda _: None)
    with pytest.raises(UserError, match="trained on None of 9"):
        fit(settings(), PROSE)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_vocabulary_too_large_names_the_largest_that_fits(model_type: str) -> None:
    with pytest.raises(UserError, match=r"vocab_size 9000 is too large for this corpus") as raised:
        fit(settings(9000, model_type), PROSE)
    largest = int(re.findall(r"fits is (\d+)", str(raised.value))[0])
    assert len(pieces(fit(settings(largest, model_type), PROSE).model)) == largest
    with pytest.raises(UserError, match="too large"):
        fit(settings(largest + 1, model_type), PROSE)


def test_a_vocabulary_too_small_names_the_smallest_that_fits() -> None:
    letters = ["".join(map(chr, range(0x4E00, 0x4E00 + 100)))] * 2
    with pytest.raises(UserError, match=r"vocab_size 300 is too small for the characters .* fits is 358"):
        fit(settings(300), letters)
    assert len(pieces(fit(settings(358), letters).model)) == 358


def test_nothing_is_printed_and_standard_error_works_afterwards(capfd: pytest.CaptureFixture[str]) -> None:
    fit(settings(), PROSE)
    with pytest.raises(UserError):
        fit(settings(9000), PROSE)
    assert capfd.readouterr() == ("", "")
    sys.stderr.write("still here")
    sys.stderr.flush()
    assert capfd.readouterr().err == "still here"
