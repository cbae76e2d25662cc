import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from writing import corpus_with

import tapernorm
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest
from tapernorm_lab.config.jobs import TokenizerJob
from tapernorm_lab.config.sections import TokenizerConfig
from tapernorm_lab.data import sentencepiece as module
from tapernorm_lab.data.sentencepiece import EOD, SPACE_MARK, Tokenizer, fit, sample, train_tokenizer

PROSE = [f"Story {i}: the {('cat', 'dog', 'owl', 'fox')[i % 4]} ran.\n\nIt hid." for i in range(40)]
HELD_OUT = ["The cat ran."]
NASTY = (
    "\x00", "\t", "\n", "\r", "\r\n", " ", "  ", "\x05", "\x7f", "\x85", "\xa0", "\u0301", "\u200d", "\u2028", "\u2047",
    "\u2585", "\u3000", "\ufeff", "\ufdd0", "\ufffd", "\uffff", "\U0010ffff", "é", "e\u0301", "ﬁ", "½",
    "\uff21", "👩‍👩‍👧", "中",
    "<unk>", "<|endoftext|>", "<0x41>", "<s>", " ⁇ ", "the", "Abraham", "0", "Z",
)  # fmt: skip
VALID = st.characters(exclude_categories=["Cs"], exclude_characters=SPACE_MARK)
TEXT = st.one_of(st.text(VALID), st.lists(st.sampled_from(NASTY), max_size=12).map("".join))


def job(**changes: Any) -> TokenizerJob:
    chosen = {"vocab_size": 300, "model_type": "bpe", "max_documents": None, "literal_u2581": "refuse"} | changes
    return TokenizerJob(tokenizer=TokenizerConfig(**chosen))


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    return corpus_with(tmp_path_factory.mktemp("prose") / "corpus", train=PROSE, valid=HELD_OUT)


@pytest.fixture(scope="module")
def coders(web_tokenizer, prose, tmp_path_factory):
    """A BPE tokenizer of real text and a Unigram tokenizer of made-up text."""
    unigram = tmp_path_factory.mktemp("unigram")
    train_tokenizer(job(model_type="unigram", vocab_size=290), prose, unigram)
    return [Tokenizer(web_tokenizer), Tokenizer(unigram)]


# --- lossless ---


@given(text=TEXT)
@example("".join(NASTY))
@example(" ".join(NASTY) + "   ")
@example("")
@settings(max_examples=400, deadline=None)
def test_any_text_comes_back_and_never_holds_a_special_id(coders, text):
    for coder in coders:
        ids = coder.encode(text)
        assert coder.decode(ids) == text
        assert not {0, coder.eod} & set(ids)
        assert all(0 <= i < coder.vocab_size for i in ids)


def test_every_character_comes_back(coders):
    points = [p for p in range(0x110000) if not 0xD800 <= p < 0xE000 and chr(p) != SPACE_MARK]
    for start in range(0, len(points), 4096):
        text = "".join(map(chr, points[start : start + 4096]))
        for coder in coders:
            assert coder.decode(coder.encode(text)) == text


def test_the_end_of_document_decodes_to_nothing(coders):
    for coder in coders:
        assert coder.decode([coder.eod, *coder.encode(" a"), coder.eod]) == " a"
        assert coder.manifest["eod"] == coder.eod


def test_ids_and_text_out_of_range_are_refused(coders):
    with pytest.raises(IndexError):
        coders[0].decode([coders[0].vocab_size])
    with pytest.raises(UnicodeEncodeError):
        coders[0].encode("half \ud83d")


# --- U+2581 ---


def test_the_space_mark_is_refused_with_its_count(coders, tmp_path):
    with pytest.raises(UserError, match=r"the text to encode holds the character U\+2581 3 times.*as_space"):
        coders[0].encode_batch(["a▁b", "plain", "▁▁"])
    for name, train, valid in (("train", [*PROSE, "a▁b▁"], HELD_OUT), ("valid", PROSE, ["▁", "c▁"])):
        corpus = corpus_with(tmp_path / name, train=train, valid=valid)
        with pytest.raises(UserError, match=r"U\+2581 2 times"):
            train_tokenizer(job(), corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_space_mark_is_taken_for_a_space_where_that_is_chosen(tmp_path):
    corpus = corpus_with(tmp_path / "corpus", train=[*PROSE, "a▁b▁"], valid=["▁"])
    manifest = train_tokenizer(job(literal_u2581="as_space"), corpus, tmp_path / "out")
    assert manifest["literal_u2581"] == {"policy": "as_space", "count": {"train": 2, "valid": 1}}
    coder = Tokenizer(tmp_path / "out")
    assert coder.encode("▁the▁▁cat") == coder.encode(" the  cat")
    assert coder.decode(coder.encode("▁the▁▁cat")) == " the  cat"


# --- training ---


def test_the_manifest_chains_corpus_and_model(prose, tmp_path):
    manifest = train_tokenizer(job(), prose, tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest
    assert (manifest["schema_version"], manifest["kind"], manifest["vocab_size"]) == (1, "tokenizer", 300)
    assert manifest["sha256"] == hashlib.sha256((tmp_path / "tokenizer.model").read_bytes()).hexdigest()
    for split in ("train", "valid"):
        assert manifest["corpus_sha256"][split] == hashlib.sha256((prose / f"{split}.jsonl").read_bytes()).hexdigest()
    assert manifest["documents"] == {"in_corpus": 40, "trained_on": 40, "drawn": "all"}
    assert manifest["literal_u2581"] == {"policy": "refuse", "count": {"train": 0, "valid": 0}}
    assert manifest["provenance"]["config_hash"] == digest(job())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "tokenizer.model"]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_training_gives_the_same_bytes_in_every_process(web_corpus, tmp_path, model_type):
    chosen = job(vocab_size=400, max_documents=60, model_type=model_type)
    here = train_tokenizer(chosen, web_corpus, tmp_path / "here")
    code = """
import sys
from pathlib import Path
from tapernorm_lab.config.jobs import TokenizerJob
from tapernorm_lab.data.sentencepiece import train_tokenizer
train_tokenizer(TokenizerJob.model_validate_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
"""
    for seed in ("1", "2"):
        out = tmp_path / seed
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(tapernorm.__file__).parents[1])}
        command = [sys.executable, "-c", code, chosen.model_dump_json(), str(web_corpus), str(out)]
        subprocess.run(command, env=env, check=True, capture_output=True)
        assert (out / "tokenizer.model").read_bytes() == (tmp_path / "here/tokenizer.model").read_bytes()
    other = train_tokenizer(
        job(vocab_size=400, max_documents=59, model_type=model_type), web_corpus, tmp_path / "other"
    )
    assert other["sha256"] != here["sha256"]  # control: one document fewer shows


def test_only_the_training_split_is_learned_from(prose, tmp_path):
    other = corpus_with(tmp_path / "corpus", train=PROSE, valid=["zyzzyva " * 500])
    first, second = train_tokenizer(job(), prose, tmp_path / "a"), train_tokenizer(job(), other, tmp_path / "b")
    assert first["sha256"] == second["sha256"]
    assert first["corpus_sha256"]["valid"] != second["corpus_sha256"]["valid"]


def test_a_sample_is_drawn_by_hash_over_the_whole_split(tmp_path):
    texts = [f"Story {i}" for i in range(400)] + ["Story 7"] * 5
    path = corpus_with(tmp_path / "corpus", train=texts) / "train.jsonl"
    drawn = list(sample(path, 100))
    order = sorted(range(len(texts)), key=lambda i: hashlib.sha256(f"tokenizer/{texts[i]}".encode()).digest())
    assert drawn == [texts[i] for i in sorted(order[:100])]
    assert drawn != texts[:100]
    assert abs(sum(texts.index(text) < 200 for text in drawn) - 50) < 25  # both halves are drawn from
    assert list(sample(path, None)) == list(sample(path, 10_000)) == texts


def test_max_documents_is_honoured_and_stated(prose, tmp_path):
    manifest = train_tokenizer(job(max_documents=10, vocab_size=290), prose, tmp_path)
    assert manifest["documents"] == {"in_corpus": 40, "trained_on": 10, "drawn": "smallest sha256 over the whole split"}


def test_a_corpus_that_is_all_validation_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no training document"):
        train_tokenizer(job(), corpus_with(tmp_path / "corpus", valid=HELD_OUT), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- opening ---


def test_a_model_that_is_not_the_manifest_s_is_refused(web_tokenizer, tmp_path):
    folder = shutil.copytree(web_tokenizer, tmp_path / "copy")
    model = folder / "tokenizer.model"
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(UserError, match="differs from its manifest"):
        Tokenizer(folder)
    model.unlink()
    with pytest.raises(UserError, match="is missing"):
        Tokenizer(folder)
    with pytest.raises(UserError, match="no tokenizer in"):
        Tokenizer(tmp_path / "nowhere")


# --- the trainer ---

SENTENCES = [
    f"The {noun} saw a {other}.\nIt ran away." for noun in ("cat", "dog", "owl") for other in ("fox", "hen", "bee")
]


def chosen(vocab_size: int = 300, model_type: str = "bpe") -> TokenizerConfig:
    return TokenizerConfig.model_validate(
        {"vocab_size": vocab_size, "model_type": model_type, "max_documents": None, "literal_u2581": "refuse"}
    )


def pieces(model: bytes) -> list[str]:
    processor = SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(processor.vocab_size())]


def test_ids_are_unknown_end_of_document_bytes_then_pieces():
    trained = fit(chosen(), SENTENCES)
    processor = SentencePieceProcessor(model_proto=trained.model)
    assert pieces(trained.model)[:258] == ["<unk>", EOD, *(f"<0x{byte:02X}>" for byte in range(256))]
    assert (trained.eod, trained.documents) == (1, len(SENTENCES))
    assert processor.is_control(trained.eod)
    assert processor.vocab_size() == 300


def test_newlines_are_learned_like_other_characters():
    assert any("\n" in piece for piece in pieces(fit(chosen(), SENTENCES).model))
    assert not any(
        "\n" in piece for piece in pieces(fit(chosen(), [text.replace("\n", " ") for text in SENTENCES]).model)
    )


def test_a_document_far_over_4192_bytes_is_learned_from():
    long = "zyzzyva " * 2000
    assert "▁zyzzyva" in pieces(fit(chosen(), [*SENTENCES, long]).model)
    assert "▁zyzzyva" not in pieces(fit(chosen(), SENTENCES).model)


def test_a_document_that_the_trainer_would_skip_is_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 4192)  # the trainer's default
    with pytest.raises(UserError, match=r"trained on 9 of 10 pieces of text: .*4192 bytes"):
        fit(chosen(), [*SENTENCES, "zyzzyva " * 2000])


def test_documents_that_hold_reserved_characters_are_learned_from():
    odd = ["zyzzyva \u2585 zyzzyva\u2585", "zyzzyva\x00 zyzzyva\t", f"zyzzyva {EOD} zyzzyva <unk> <0x41>"] * 5
    trained = fit(chosen(), [*SENTENCES, *odd, "\u2585", "\n\n"])
    assert "▁zyzzyva" in pieces(trained.model)
    assert trained.documents == len(SENTENCES) + len(odd) + 2


def test_a_lost_log_line_counts_as_a_lost_document(monkeypatch):
    monkeypatch.setattr(module, "_sentences_loaded", lambda _: None)
    with pytest.raises(UserError, match="trained on None of 9"):
        fit(chosen(), SENTENCES)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_vocabulary_too_large_names_the_largest_that_fits(model_type):
    with pytest.raises(UserError, match=r"vocab_size 9000 is too large for this corpus") as raised:
        fit(chosen(9000, model_type), SENTENCES)
    largest = int(re.findall(r"fits is (\d+)", str(raised.value))[0])
    assert len(pieces(fit(chosen(largest, model_type), SENTENCES).model)) == largest
    with pytest.raises(UserError, match="too large"):
        fit(chosen(largest + 1, model_type), SENTENCES)


def test_a_vocabulary_too_small_names_the_smallest_that_fits():
    letters = ["".join(map(chr, range(0x4E00, 0x4E00 + 100)))] * 2
    with pytest.raises(UserError, match=r"vocab_size 300 is too small for the characters .* fits is 358"):
        fit(chosen(300), letters)
    assert len(pieces(fit(chosen(358), letters).model)) == 358


def test_nothing_is_printed_and_standard_error_works_afterwards(capfd):
    fit(chosen(), SENTENCES)
    with pytest.raises(UserError):
        fit(chosen(9000), SENTENCES)
    assert capfd.readouterr() == ("", "")
    sys.stderr.write("still here")
    sys.stderr.flush()
    assert capfd.readouterr().err == "still here"
