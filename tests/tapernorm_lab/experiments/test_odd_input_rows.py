"""Odd inputs as they are cut from streams and blocks: which ids, which positions, what is said of them."""

import pytest
import torch
from odd_models import CONTEXT, LENGTHS, VOCABULARY, job, make

from tapernorm.util.errors import UserError
from tapernorm_lab.data.blocks import Blocks
from tapernorm_lab.data.sentencepiece import Tokenizer
from tapernorm_lab.data.token_stream import TokenStream
from tapernorm_lab.experiments.odd_inputs.rows import odd_inputs

START, REPEAT = CONTEXT // 4, 5


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("odd"))


def rows_of(made, **changes):
    found = odd_inputs(job(**changes), Tokenizer(made / "tokenizer"), made / "tokens", {"code": made / "code"})
    return {odd.name: odd for odd in found}


def ids_of(made, split):
    return TokenStream.open(made / "tokens", split).tokens.long()


def test_every_kind_of_row_is_there_with_its_positions(made):
    found = rows_of(made)
    assert list(found) == ["held_out", "code", "rare", "never_seen", "longer"]
    parts = {name: [(part.name, part.first, part.last) for part in odd.parts] for name, odd in found.items()}
    repeats = [("repeats", START - 1, START + REPEAT - 1), ("after", START + REPEAT - 1, CONTEXT)]
    assert parts == {
        "held_out": [("all", 0, CONTEXT), ("unrepeated", START - 1, CONTEXT - REPEAT)],
        "code": [("all", 0, CONTEXT)],
        "rare": repeats,
        "never_seen": repeats,
        "longer": [("to_16", 0, 16), ("to_20", 16, 20), ("to_28", 20, 28)],
    }
    count = (len(ids_of(made, "valid")) - 1) // CONTEXT
    assert [len(odd.rows) for odd in found.values() if odd.name in ("held_out", "rare", "never_seen")] == [count] * 3
    assert torch.equal(found["code"].rows, Blocks.open(made / "code", "valid").rows.long())
    assert found["longer"].rows.shape == ((len(ids_of(made, "valid")) - 1) // LENGTHS[-1], LENGTHS[-1] + 1)


def test_what_follows_the_repeats_is_the_text_that_it_is_compared_with(made):
    found = rows_of(made)
    _, plain = found["held_out"].parts
    for name in ("rare", "never_seen"):
        _, after = found[name].parts
        targets = found[name].rows[:, after.first + 1 : after.last + 1]
        assert torch.equal(targets, found["held_out"].rows[:, plain.first + 1 : plain.last + 1])
        assert not torch.equal(targets, found["held_out"].rows[:, after.first + 1 : after.last + 1])


def test_repeated_tokens_are_rare_or_never_seen_and_no_end_of_document(made):
    train, found = ids_of(made, "train"), rows_of(made)
    eod = Tokenizer(made / "tokenizer").eod
    often = torch.bincount(train, minlength=VOCABULARY)
    known = sorted(often[i].item() for i in range(VOCABULARY) if often[i] and i != eod)
    for name, bound in {"rare": known[8], "never_seen": 0}.items():
        inserted = found[name].rows[:, START : START + REPEAT]
        assert (inserted == inserted[:, :1]).all()
        assert often[inserted].max() <= bound
        assert (often[inserted].min() > 0) == (name == "rare")
        assert eod not in inserted
    everyone = rows_of(made, rare_tokens=1000)["rare"].origin
    assert f"one of {len(known)} tokens that" in everyone  # all that occur but the end of a document
    assert f"one of 9 tokens that the training text has {known[0]} to {known[8]} times" in found["rare"].origin
    assert "that the training text never has, 5 times from token 4 on" in found["never_seen"].origin


def test_rows_and_their_hash_are_a_function_of_the_seed(made):
    first, again, other = (rows_of(made, seed=seed, max_rows=20) for seed in (0, 0, 1))
    for name in first:
        assert first[name].facts() == again[name].facts()
        assert torch.equal(first[name].rows, again[name].rows)
        assert first[name].facts()["rows_sha256"] != other[name].facts()["rows_sha256"] or name in ("code", "longer")


def test_tokens_never_seen_are_left_out_where_there_are_none(made, monkeypatch):
    monkeypatch.setattr("tapernorm_lab.experiments.odd_inputs.rows.never_seen", lambda counts: counts[:0])
    assert list(rows_of(made)) == ["held_out", "code", "rare", "longer"]


def test_streams_of_another_tokenizer_rows_of_another_length_and_short_streams_are_refused(made, tmp_path):
    with pytest.raises(UserError, match="have 17 tokens, and models of context 12 are tried on rows of 13"):
        rows_of(made, context=12)
    with pytest.raises(UserError, match=r"one row of robustness.lengths takes 40001: lower them"):
        rows_of(made, lengths=[40_000])
    other = make(tmp_path / "other")
    coder = Tokenizer(other / "tokenizer")
    coder.manifest["sha256"] = "0" * 64
    with pytest.raises(UserError, match="tokens was written with another tokenizer than the one given"):
        odd_inputs(job(), coder, made / "tokens", {"code": made / "code"})
