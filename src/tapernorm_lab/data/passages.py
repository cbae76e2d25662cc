"""The split of a few documents by passages: validation takes contiguous passages from several places.

The distinct documents of a source are concatenated and divided into equal sections. Validation takes a passage from the
middle of each section, all of equal length; training takes the rest. A passage ends at the nearest end of a paragraph,
or else of a line, a sentence or a word. It never ends inside a character of several code points. No text is lost.
"""

import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from math import ceil
from typing import Literal, Self

_PLACES = 8  # most validation passages
_PASSAGE = 4096  # least characters of a passage if several are taken
_LEAST = 16  # least characters of validation or training text
_ENDS = (
    re.compile(r"(?:\r\n|[\n\r])(?:[ \t]*(?:\r\n|[\n\r]))+|\u2029"),  # of a paragraph
    re.compile(r"\r\n|[\n\r\x85\u2028]"),  # of a line
    re.compile(r"[.!?…][\"'”’»)\]]*\s+|[。！？][」』”’）]*"),  # of a sentence
    re.compile(r"\s+"),  # of a word
)
_JOINER = "\u200d"
_RUN = 1 << 14  # most consecutive regional-indicator letters that are counted


def identity_of(text: str) -> bytes:
    """Return the sha256 of a document, which identifies equal documents."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def least_characters(fraction: float) -> int:
    """Return the total number of characters that documents need to be split by passages."""
    return ceil(round(_LEAST / min(fraction, 1 - fraction), 6))


@dataclass(frozen=True)
class Layout:
    """The distinct documents of one source, concatenated, and the passages of them that are held out."""

    starts: Mapping[bytes, int]  # `identity_of` a document -> offset of its first character
    characters: int  # characters of all documents
    fraction: float  # fraction that is held out

    @classmethod
    def of(cls, documents: Iterable[str], fraction: float, *, others: Collection[bytes] = ()) -> Self:
        """Lay out documents, except blank ones and those in `others`, which another layout holds."""
        starts: dict[bytes, int] = {}
        characters = 0
        for text in documents:
            identity = identity_of(text)
            if text and not text.isspace() and identity not in starts and identity not in others:
                starts[identity] = characters
                characters += len(text)
        return cls(starts, characters, fraction)

    def passages(self, text: str) -> Iterator[tuple[Literal["train", "valid"], str]]:
        """Yield the passages of one of the documents in order, each with its split.

        All documents together must have `least_characters(fraction)` characters.
        """
        start = self.starts[identity_of(text)]
        borders = self._borders()
        inside = [border - start for border in borders if start < border < start + len(text)]
        passed = sum(border <= start for border in borders)
        ends = [0, *(_cut(text, border, self._reach) for border in inside), len(text)]
        pieces = [text[one:other] for one, other in pairwise(ends)]
        for place, piece in _without_blank(pieces):
            yield "valid" if (passed + place) % 2 else "train", piece

    @property
    def _smaller(self) -> float:
        """Characters of the smaller split."""
        return min(self.fraction, 1 - self.fraction) * self.characters

    @property
    def _places(self) -> int:
        return max(1, min(_PLACES, int(self._smaller // _PASSAGE)))

    @property
    def _reach(self) -> int:
        """Characters that a border may move by: no passage loses or gains more than half of its length."""
        return int(self._smaller / self._places / 4)

    def _borders(self) -> list[int]:
        """Return the offsets of all borders before any is moved; every second one ends a validation passage."""
        section = self.characters / self._places
        half = section * self.fraction / 2
        middles = [section * (place + 0.5) for place in range(self._places)]
        return [round(middle + side) for middle in middles for side in (-half, half)]


def _cut(text: str, target: int, reach: int) -> int:
    """Return the offset nearest to `target` at the best kind of text end within `reach` characters."""
    low, high = target - reach, target + reach
    if low <= 0 or high >= len(text):
        return 0 if target <= len(text) - target else len(text)
    for end in _ENDS:
        found = (match.end() for match in end.finditer(text, max(low - 2, 0), high))
        places = [place for place in found if low <= place and not _is_joined(text, place)]
        if places:
            return min(places, key=lambda place: abs(place - target))
    offsets = (offset for distance in range(reach + 1) for offset in (-distance, distance))
    return next((target + offset for offset in offsets if not _is_joined(text, target + offset)), target)


def _is_joined(text: str, place: int) -> bool:
    """Whether the code points on either side of `place` make one character, or one line end."""
    before, after = text[place - 1], text[place]
    letters = sum(1 for _ in takewhile(_is_letter_of_flag, reversed(text[max(place - _RUN, 0) : place])))
    return (
        (before == "\r" and after == "\n")
        or _JOINER in (before, after)
        or unicodedata.category(after).startswith("M")
        or "\U0001f3fb" <= after <= "\U0001f3ff"  # skin tone modifier
        or "\u1160" <= after <= "\u11ff"  # vowel or final consonant of a Hangul syllable
        or "\U000e0020" <= after <= "\U000e007f"  # tag character of a flag
        or (letters % 2 == 1 and _is_letter_of_flag(after))
    )


def _is_letter_of_flag(point: str) -> bool:
    """Whether the code point is a regional indicator; two of them make one flag."""
    return "\U0001f1e6" <= point <= "\U0001f1ff"


def _without_blank(pieces: Iterable[str]) -> list[tuple[int, str]]:
    """Return (place, piece) of pieces with a visible character; blank pieces are appended to the one before them.

    Blank pieces before the first visible one are prepended to it.
    """
    kept: list[tuple[int, str]] = []
    blank = ""
    for place, piece in enumerate(pieces):
        if piece and not piece.isspace():
            kept.append((place, blank + piece))
            blank = ""
        elif kept:
            kept[-1] = kept[-1][0], kept[-1][1] + piece
        else:
            blank += piece
    return kept
