"""Text from a checkpoint on disk, by models made to write a known one."""

from pathlib import Path

import pytest
import writing

from tapernorm.util.errors import UserError
from tapernorm_lab.data.sentencepiece import Tokenizer
from tapernorm_lab.experiments.generate import find_tokenizer, stream_text

GREEDY = {"tokenizer": None, "new_tokens": None, "temperature": 0.0, "top_k": None, "top_p": None}
OPTIONS = {**GREEDY, "seed": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "tiny"
    writing.make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def coder(run: Path) -> Tokenizer:
    return Tokenizer(run / "data" / "tokenizer")


def writer(run: Path, chain: list[int], name: str, **options) -> Path:
    return writing.make_writer(run / "pretrain" / name, chain, **options)


def pieces(checkpoint: Path, prompt: str, **changes) -> list[str]:
    return list(stream_text(checkpoint, prompt, **{**OPTIONS, **changes}))


# --- streaming ---


@pytest.mark.parametrize("text", [" ran", " 😀", "é", "中z", "\u2028z", "�", "a\u0301"])
def test_the_text_comes_whole_and_ends_at_the_end_of_the_document(run: Path, coder: Tokenizer, text: str) -> None:
    chain = [*coder.encode("dog"), *coder.encode(text), coder.eod]
    found = pieces(writer(run, chain, "texts"), "dog")
    assert found[0] == "dog"
    assert "".join(found) == "dog" + text
    assert len(coder.encode(text)) == len(chain) - 1 - len(coder.encode("dog"))


def test_a_character_of_many_pieces_is_shown_once_it_is_whole(run: Path, coder: Tokenizer) -> None:
    assert len(coder.encode("😀")) == 4
    assert [coder.decode(coder.encode("😀")[:n]) for n in (1, 2, 3, 4)] == ["�", "��", "���", "😀"]
    chain = [*coder.encode("dog"), *coder.encode("😀é."), coder.eod]
    found = pieces(writer(run, chain, "emoji"), "dog")
    assert [piece for piece in found if piece] == ["dog", "😀", "é", "."]


def test_bytes_that_never_become_a_character_are_shown_at_the_end(run: Path, coder: Tokenizer) -> None:
    smile, letter = coder.encode("😀"), coder.encode("z")
    begun = writer(run, [*coder.encode("dog"), *smile[:2], coder.eod], "begun")
    assert "".join(pieces(begun, "dog")) == "dog��"
    broken = writer(run, [*coder.encode("dog"), *smile[:2], *letter, coder.eod], "broken")
    assert [piece for piece in pieces(broken, "dog") if piece] == ["dog", "��z"]
    cut = writer(run, [*coder.encode("dog"), *smile, coder.eod], "cut")
    assert "".join(pieces(cut, "dog", new_tokens=3)) == "dog���"
    assert "".join(pieces(cut, "dog", new_tokens=4)) == "dog😀"


def test_an_empty_prompt_begins_a_document(run: Path, coder: Tokenizer) -> None:
    ids = coder.encode("fox")
    checkpoint = writer(run, [coder.eod, *ids], "empty")
    assert "".join(pieces(checkpoint, "", new_tokens=len(ids))) == "fox"
    assert "".join(pieces(checkpoint, "fo", new_tokens=1)) != "fo"


def test_new_tokens_bound_the_text_and_the_context_does_by_default(run: Path, coder: Tokenizer) -> None:
    chain = coder.encode("dog") + [i for i in range(200, 240) if i not in coder.encode("dog")]
    checkpoint = writer(run, chain, "long", context=30)
    prompt = len(coder.encode("dog"))
    for new_tokens, written in ((7, 7), (None, 30 - prompt)):
        expected = coder.decode(chain[prompt : prompt + written])
        assert "".join(pieces(checkpoint, "dog", new_tokens=new_tokens)) == "dog" + expected


def test_sampling_repeats_under_a_seed(run: Path, coder: Tokenizer) -> None:
    checkpoint = writer(run, [*coder.encode("dog"), coder.eod], "random")  # all logits after the prompt but one are 0
    hot = {"temperature": 5.0, "new_tokens": 12}
    texts = ["".join(pieces(checkpoint, "dog", **hot, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert "".join(pieces(checkpoint, "dog", **hot, top_k=1)) == "dog"
    assert "".join(pieces(checkpoint, "dog", **hot, top_p=1e-6)) == "dog"


def test_int8_weights_write_the_known_text(run: Path, coder: Tokenizer) -> None:
    chain = [*coder.encode("dog"), *coder.encode(" ran"), coder.eod]
    checkpoint = writer(run, chain, "int8")
    assert "".join(pieces(checkpoint, "dog", weights="int8")) == "dog ran"


# --- refused before anything is shown ---


def refused(*arguments, **changes) -> str:
    shown = []
    with pytest.raises(UserError) as error:
        shown.extend(stream_text(*arguments, **{**OPTIONS, **changes}))
    assert shown == []
    return str(error.value)


def test_options_out_of_range(run: Path) -> None:
    assert "temperature must be at least 0" in refused(run, "dog", temperature=-1.0)
    assert "top_k must be at least 1, got 0" in refused(run, "dog", top_k=0)
    assert "top_p must lie in (0, 1], got 2.0" in refused(run, "dog", top_p=2.0)


def test_a_prompt_and_new_tokens_beyond_the_context(run: Path, coder: Tokenizer) -> None:
    checkpoint, prompt = writer(run, [5, 6], "short", context=8), "dog" * 3
    length = len(coder.encode(prompt))
    said = refused(checkpoint, prompt, new_tokens=8)
    assert f"a cache of {length + 8} tokens exceeds the model's context of 8" in said
    assert "shorten the prompt, or ask for fewer new tokens" in said
    assert "exceeds the model's context of 8" in refused(checkpoint, "dog" * 20)


def test_a_tokenizer_of_another_vocabulary(run: Path) -> None:
    checkpoint = writer(run, [5, 6], "other", vocab_size=321)
    said = refused(checkpoint, "dog")
    assert said.startswith("the tokenizer has 320 pieces and the model 321: give the one it was trained with")


def test_a_prompt_that_is_no_text(run: Path) -> None:
    checkpoint = writer(run, [5, 6], "bytes")
    assert refused(checkpoint, "dog \udcff") == "the prompt is not valid UTF-8: give it as text"
    assert "U+2581" in refused(checkpoint, "dog\u2581")


# --- its tokenizer ---


def test_the_tokenizer_is_that_of_the_run_around_the_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (run / "data" / "tokenizer").resolve()
    deep = run / "pretrain" / "all" / "d24" / "seed1"
    deep.mkdir(parents=True)
    assert find_tokenizer(deep) == find_tokenizer(run) == expected
    monkeypatch.chdir(deep)
    assert find_tokenizer(Path()) == find_tokenizer(Path("..")) == expected


def test_a_checkpoint_outside_any_run_needs_its_tokenizer_named(run: Path, coder: Tokenizer, tmp_path: Path) -> None:
    ids = coder.encode("dog ran")
    checkpoint = writing.make_writer(tmp_path / "alone", ids)
    assert f"no tokenizer belongs to {checkpoint}: name its folder, --tokenizer DIR" in refused(checkpoint, "dog")
    (tmp_path / "data" / "tokenizer").mkdir(parents=True)  # of a run that was cut short
    assert "no tokenizer belongs to" in refused(checkpoint, "dog")
    named = {"tokenizer": run / "data" / "tokenizer", "new_tokens": len(ids) - len(coder.encode("dog"))}
    assert "".join(pieces(checkpoint, "dog", **named)) == "dog ran"
