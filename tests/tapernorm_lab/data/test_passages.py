"""Few documents by passages: nothing lost, nothing on both sides, cut where a reader would."""

import hashlib

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from tapernorm_lab.data.passages import Layout, identity_of, least_characters

PARAGRAPH = "It was the {} day. The wind had turned, and nobody spoke of it! Would they sail?\nThey would."
BOOK = "\n\n".join(PARAGRAPH.format(i) for i in range(2000))
CHARACTERS = ["e\u0301", "👩‍👩‍👧", "🇩🇪", "👍🏽", "각", "\r\n", "ق\u0651", "x\ufe0f\u20e3"]


def passages(text, fraction=0.05):
    return list(Layout.of([text], fraction).passages(text))


def of_split(found, split):
    return [text for its_split, text in found if its_split == split]


def characters_of(text):
    """By the rules of Unicode, from another library."""
    return set(regex.findall(r"\X", text))


def test_validation_comes_from_several_places_and_is_the_share_that_was_asked_for():
    for fraction in (0.01, 0.05, 0.3, 0.5, 0.9):
        found = passages(BOOK, fraction)
        share = sum(map(len, of_split(found, "valid"))) / len(BOOK)
        assert share == pytest.approx(fraction, rel=0.1)
        assert [split for split, _ in found[::2]] == ["train"] * len(found[::2])
    places = of_split(passages(BOOK), "valid")
    assert len(places) == 2  # of 4096 characters at least
    assert len(of_split(passages(BOOK * 20), "valid")) == 8
    starts = [BOOK.index(text) / len(BOOK) for text in places]
    assert starts == pytest.approx([0.25, 0.75], abs=0.03)


def test_a_book_is_cut_at_the_ends_of_its_paragraphs():
    for end in ("\n\n", "\r\n\r\n", "\n \t\n", "\r\r", "\u2029"):
        text = BOOK.replace("\n\n", end)
        found = [piece for _, piece in passages(text)]
        assert "".join(found) == text
        assert all(piece.endswith(end) for piece in found[:-1])
        assert not any(piece[:1].isspace() for piece in found)


def test_without_paragraphs_lines_then_sentences_then_words_are_cut():
    one_line = BOOK.replace("\n\n", " ").replace("\n", " ")
    texts = {
        "\n": BOOK.replace("\n\n", "\n"),
        "! ": one_line.replace(". ", "! ").replace("? ", "! "),
        "。": "風が変わった。" * 3000,
        " ": regex.sub(r"[.!?]", "", one_line),
    }
    for end, text in texts.items():
        found = [piece for _, piece in passages(text)]
        assert len(found) > 2
        assert "".join(found) == text
        assert all(piece.endswith(end) for piece in found[:-1]), end


PIECES = st.one_of(st.sampled_from(["\n\n", "\n", " ", ". ", *CHARACTERS]), st.text(max_size=30))
TEXT = st.lists(PIECES, min_size=1, max_size=60).map(lambda parts: "".join(parts) * 4)


@settings(max_examples=300, deadline=None)
@given(text=TEXT, fraction=st.sampled_from([0.05, 0.2, 0.5, 0.77]))
def test_nothing_is_lost_and_no_character_is_cut(text, fraction):
    layout = Layout.of([text], fraction)
    if layout.characters < least_characters(fraction):
        return
    found = [piece for _, piece in layout.passages(text)]
    assert "".join(found) == text
    assert not any(piece.isspace() or not piece for piece in found)
    assert len({split for split, _ in layout.passages(text)}) == 2 or text.split() == []


@pytest.mark.parametrize("character", [character for character in CHARACTERS if not character.isspace()])
@pytest.mark.parametrize("shift", range(5))
def test_no_cut_falls_inside_a_character_of_several_code_points(character, shift):
    text = "a" * shift + character * 2000
    found = [piece for _, piece in passages(text)]
    assert len(found) > 2
    assert set().union(*map(characters_of, found)) <= {"a", character}
    assert "".join(found) == text


def test_copies_of_a_document_lie_once_and_are_cut_alike():
    other = BOOK.replace("wind", "tide")
    once, twice = Layout.of([BOOK, other], 0.1), Layout.of([BOOK, BOOK, other, BOOK, " \n"], 0.1)
    assert once == twice
    assert list(once.passages(BOOK)) == list(twice.passages(BOOK))
    assert Layout.of([BOOK, other], 0.1, others=once.starts) == Layout({}, 0, 0.1)
    assert identity_of(BOOK) == hashlib.sha256(BOOK.encode()).digest()


def test_documents_stand_end_to_end_and_a_passage_spans_none():
    """Held out are the middle of the whole, and so a part of one document where they are of equal length."""
    documents = [f"{name} " * 600 for name in ("one", "two", "six")]
    layout = Layout.of(documents, 0.1)
    found = {text[:3]: list(layout.passages(text)) for text in documents}
    assert [split for split, _ in found["one"]] == [split for split, _ in found["six"]] == ["train"]
    assert [split for split, _ in found["two"]] == ["train", "valid", "train"]
    assert sum(len(piece) for split, piece in found["two"] if split == "valid") == pytest.approx(720, rel=0.1)


@pytest.mark.parametrize(("fraction", "needed"), [(0.05, 320), (0.5, 32), (0.9, 160)])
def test_the_least_text_that_can_be_cut(fraction, needed):
    assert least_characters(fraction) == needed
    found = passages("word " * (needed // 5 + 1), fraction)
    assert {split for split, _ in found} == {"train", "valid"}
