"""Few documents, split by passages: validation takes contiguous stretches of them from several places.

The documents of a source are laid end to end, a repeated one once. Validation takes passages of equal length from the
middle of as many equal sections; training takes the rest. A passage ends at the nearest end of a paragraph, else of a
line, a sentence or a word, never inside a character that several code points make. No text is lost.
"""

import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from math import ceil
from typing import Literal, Self

_PLACES = 8  # validation passages, at most
_PASSAGE = 4096  # characters of one, where several are taken
_LEAST = 16  # characters of validation or training text
_ENDS = (
    re.compile(r"(?:\r\n|[\n\r])(?:[ \t]*(?:\r\n|[\n\r]))+|\u2029"),  # of a paragraph
    re.compile(r"\r\n|[\n\r\x85\u2028]"),  # of a line
    re.compile(r"[.!?…][\"'”’»)\]]*\s+|[。！？][」』”’）]*"),  # of a sentence
    re.compile(r"\s+"),  # of a word
)
_JOINER = "\u200d"
_RUN = 1 << 14  # letters of flags in a row that are counted


def identity_of(text: str) -> bytes:
    """The sha256 of a document: equal documents are one."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def least_characters(fraction: float) -> int:
    """Characters that documents must have together to be split by passages."""
    return ceil(round(_LEAST / min(fraction, 1 - fraction), 6))


@dataclass(frozen=True)
class Layout:
    """The distinct documents of one source end to end, and the passages of them that are held out."""

    starts: Mapping[bytes, int]  # `identity_of` a document -> place of its first character
    characters: int  # of all of them
    fraction: float  # that is held out

    @classmethod
    def of(cls, documents: Iterable[str], fraction: float, *, others: Collection[bytes] = ()) -> Self:
        """Lay out documents, but for blank ones, which no corpus holds, and for `others`, which lie elsewhere."""
        starts: dict[bytes, int] = {}
        characters = 0
        for text in documents:
            identity = identity_of(text)
            if text and not text.isspace() and identity not in starts and identity not in others:
                starts[identity] = characters
                characters += len(text)
        return cls(starts, characters, fraction)

    def passages(self, text: str) -> Iterator[tuple[Literal["train", "valid"], str]]:
        """The passages of one of the documents, in order, with their split.

        The documents must have `least_characters` of the fraction together.
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
        """How far a border may move: no passage loses or gains more than half of its length."""
        return int(self._smaller / self._places / 4)

    def _borders(self) -> list[int]:
        """Where a passage starts or ends before any border is moved; every second one ends a validation passage."""
        section = self.characters / self._places
        half = section * self.fraction / 2
        middles = [section * (place + 0.5) for place in range(self._places)]
        return [round(middle + side) for middle in middles for side in (-half, half)]


def _cut(text: str, target: int, reach: int) -> int:
    """The place nearest to `target` where text ends, and the best kind of end that there is within `reach`."""
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
        or "\U0001f3fb" <= after <= "\U0001f3ff"  # the colour of a skin
        or "\u1160" <= after <= "\u11ff"  # a later part of a syllable of Hangul
        or "\U000e0020" <= after <= "\U000e007f"  # the tag of a flag
        or (letters % 2 == 1 and _is_letter_of_flag(after))
    )


def _is_letter_of_flag(point: str) -> bool:
    """Whether two of these make one flag."""
    return "\U0001f1e6" <= point <= "\U0001f1ff"


def _without_blank(pieces: Iterable[str]) -> list[tuple[int, str]]:
    """(place, piece) of those with a visible character, with the white space that stood after them, or before all."""
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
