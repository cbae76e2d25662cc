"""Short forms of many module names: model.layers.{3-9,12}.{input,post_attention}_layernorm, and `fnmatch` patterns."""

import re
from collections.abc import Collection, Sequence
from itertools import pairwise, takewhile


def of_blocks(names: Collection[str]) -> list[str]:
    """Return names of modules in short form: one for all names that occur in the same numbered blocks."""
    alike, others = _alike(names)
    return [f"{before}.{_runs(blocks)}.{in_braces(afters)}" for (before, blocks), afters in alike.items()] + others


def patterns(names: Collection[str], among: Collection[str]) -> list[str]:
    """Return `fnmatch` patterns that match these names and no other names of `among`, a superset of them."""
    alike, others = _alike(names)
    every = {after for afters in _alike(among)[0].values() for after in afters}
    found = []
    for (before, blocks), afters in alike.items():
        endings = ["*"] if set(afters) == every else afters
        found += [f"{before}.{digits}.{ending}" for ending in endings for digits in _digits(blocks)]
    return found + others


def _alike(names: Collection[str]) -> tuple[dict[tuple[str, tuple[int, ...]], list[str]], list[str]]:
    """Return (prefix, block numbers) -> suffixes that occur in just these blocks, and the names without a number."""
    numbers: dict[tuple[str, str], list[int]] = {}
    others = []
    for name in names:
        found = re.fullmatch(r"(.*?)\.(\d+)\.(.*)", name)
        if found is None:
            others.append(name)
        else:
            numbers.setdefault((found[1], found[3]), []).append(int(found[2]))
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (before, after), blocks in numbers.items():
        alike.setdefault((before, tuple(sorted(blocks))), []).append(after)
    return alike, others


def in_braces(names: Sequence[str]) -> str:
    """Return several names in one, with their common prefix and suffix outside the braces: {q,k,v}_proj."""
    if len(names) == 1:
        return names[0]
    start = beginning(names)
    end = beginning([name[len(start) :][::-1] for name in names])[::-1]
    return f"{start}{{{','.join(name[len(start) : len(name) - len(end)] for name in names)}}}{end}"


def beginning(texts: Sequence[str]) -> str:
    """Return the longest common prefix."""
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in same)


def _digits(numbers: Sequence[int]) -> list[str]:
    """Return patterns that match just these numbers: 10 and 11 give 1[01]."""
    last: dict[str, str] = {}  # leading digits -> last digits
    for number in numbers:
        last[str(number)[:-1]] = last.get(str(number)[:-1], "") + str(number)[-1]
    return [leading + (digits if len(digits) == 1 else f"[{digits}]") for leading, digits in last.items()]


def _runs(numbers: Sequence[int]) -> str:
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return runs[0] if runs == [str(numbers[0])] else f"{{{','.join(runs)}}}"
