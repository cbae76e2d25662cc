"""Tokenizers of transformers as coders: what they make of a text, marks at its ends, and what is refused."""

import json
from pathlib import Path

import pytest
from own_models import BOS, EOS, SPARE, story, tokenizer
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tapernorm.data.coders import open_tokenizer
from tapernorm.data.hubtokenizer import save_hub_tokenizer
from tapernorm.errors import UserError

SHARED = Path(__file__).parents[2] / "shared"
CASES = {"bos and eos": (True, True), "eos alone": (False, True), "bos alone": (True, False)}
ODD = " \t\n\n  naïve 中 👩‍👩‍👧 e\u0301 \u2581 don't"


@pytest.fixture(params=CASES)
def folders(request, tmp_path):
    bos, eos = CASES[request.param]
    tokenizer(bos=bos, eos=eos).save_pretrained(tmp_path / "source")
    return tmp_path / "source", tmp_path / "out", bos, eos


def coder_of(folders):
    source, out, *_ = folders
    save_hub_tokenizer(source, out, vocab_size=len(AutoTokenizer.from_pretrained(source)) + SPARE)
    return open_tokenizer(out)


def test_ids_are_those_of_transformers_and_the_separator_stands_at_no_end(folders):
    coder, (_, _, bos, eos) = coder_of(folders), folders
    own = AutoTokenizer.from_pretrained(folders[0])
    assert coder.eod == own.convert_tokens_to_ids(EOS if eos else BOS)
    for text in [story(3), ODD, "", "x"]:
        ids = own(text)["input_ids"]
        expected = ids if bos == eos or not bos else ids[1:]  # BOS ends documents: it does not begin them as well
        assert coder.encode(text) == expected
        assert coder.encode_batch([text, text]) == [expected, expected]
        assert coder.decode([*expected, coder.eod]) == text
    assert (coder.encode("x")[0] == own.convert_tokens_to_ids(BOS)) == (bos and eos)
    assert coder.vocab_size == len(own) + SPARE


def test_the_literal_text_of_a_mark_is_text(folders):
    coder = coder_of(folders)
    text = f"a {EOS} b {BOS}"
    ids = coder.encode(text)
    assert coder.eod not in ids
    assert coder.decode(ids) == text
    assert coder.eod in AutoTokenizer.from_pretrained(folders[0])(text)["input_ids"]  # transformers reads it as a mark


def test_the_copy_loads_in_transformers_and_is_refused_when_changed(folders):
    coder, out = coder_of(folders), folders[1]
    assert AutoTokenizer.from_pretrained(out)("the cat")["input_ids"][-1] == coder.encode("the cat")[-1]
    (out / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not what its manifest describes"):
        open_tokenizer(out)


def test_what_cannot_serve_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"put its tokenizer.json there"):
        save_hub_tokenizer(tmp_path, tmp_path / "out", vocab_size=5)
    tokenizer(bos=False, eos=False).save_pretrained(tmp_path / "endless")
    with pytest.raises(UserError, match="name one as eos_token"):
        save_hub_tokenizer(tmp_path / "endless", tmp_path / "out", vocab_size=5000)
    tokenizer(bos=False).save_pretrained(tmp_path / "large")
    with pytest.raises(UserError, match="ids and the model 29"):
        save_hub_tokenizer(tmp_path / "large", tmp_path / "out", vocab_size=29)
    assert not (tmp_path / "out").exists()


def test_code_beside_a_tokenizer_is_not_run(tmp_path):
    made = Tokenizer(models.WordLevel({"a": 0, "<e>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>").save_pretrained(tmp_path / "source")
    (tmp_path / "source/own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    config = json.loads((tmp_path / "source/tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (tmp_path / "source/tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="custom code"):
        save_hub_tokenizer(tmp_path / "source", tmp_path / "out", vocab_size=9)
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(not (SHARED / "models/stories260K").is_dir(), reason="stories260K is not there: ../shared")
def test_the_pieces_of_stories260k_join_as_its_own_rule_joins_them():
    from stories260k import BOS as FIRST
    from stories260k import pieces_of, tokenizer_of

    pieces, scores = pieces_of(SHARED / "models/stories260K")
    ids = {piece: i for i, piece in enumerate(pieces)}

    def greedily(text):
        found = [i for c in " " + text for i in ([ids[c]] if c in ids else [b + 3 for b in c.encode()])]
        while True:
            pairs = [
                (scores[ids[p]], -i, ids[p])
                for i in range(len(found) - 1)
                if (p := pieces[found[i]] + pieces[found[i + 1]]) in ids
            ]
            if not pairs:
                return found
            _, place, joined = max(pairs)
            found[-place : 2 - place] = [joined]

    made = tokenizer_of(pieces, scores)
    text = (SHARED / "data/tinystories/valid.txt").read_text(encoding="utf-8")
    for sample in [*text.split("<|endoftext|>")[:12], ODD.replace("\u2581", ""), "<s> </s> <0x41>"]:
        encoded = made.encode(sample).ids
        assert encoded == greedily(sample)
        assert FIRST not in encoded
        assert made.decode(encoded) == sample
