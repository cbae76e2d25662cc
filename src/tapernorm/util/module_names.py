"""Names of modules, many written as one: model.layers.{3-9,12}.{input,post_attention}_layernorm, or as patterns."""

import re
from collections.abc import Collection, Sequence
from itertools import pairwise, takewhile


def of_blocks(names: Collection[str]) -> list[str]:
    """Full names of modules, those of the same numbered blocks in one."""
    alike, others = _alike(names)
    return [f"{before}.{_runs(blocks)}.{in_braces(afters)}" for (before, blocks), afters in alike.items()] + others


def patterns(names: Collection[str], among: Collection[str]) -> list[str]:
    """Patterns (`fnmatch`) that match these names and no others of `among`, which holds them."""
    alike, others = _alike(names)
    every = {after for afters in _alike(among)[0].values() for after in afters}
    found = []
    for (before, blocks), afters in alike.items():
        endings = ["*"] if set(afters) == every else afters
        found += [f"{before}.{digits}.{ending}" for ending in endings for digits in _digits(blocks)]
    return found + others


def _alike(names: Collection[str]) -> tuple[dict[tuple[str, tuple[int, ...]], list[str]], list[str]]:
    """(what stands before the number, blocks) -> what stands behind it in these; and the names without a number."""
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
    """Names in one, by what they begin and end with alike: {q,k,v}_proj."""
    if len(names) == 1:
        return names[0]
    start = beginning(names)
    end = beginning([name[len(start) :][::-1] for name in names])[::-1]
    return f"{start}{{{','.join(name[len(start) : len(name) - len(end)] for name in names)}}}{end}"


def beginning(texts: Sequence[str]) -> str:
    """What all of them begin with."""
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in same)


def _digits(numbers: Sequence[int]) -> list[str]:
    """Patterns of just these numbers: 10 and 11 are 1[01]."""
    last: dict[str, str] = {}  # all digits but the last -> the last ones
    for number in numbers:
        last[str(number)[:-1]] = last.get(str(number)[:-1], "") + str(number)[-1]
    return [leading + (digits if len(digits) == 1 else f"[{digits}]") for leading, digits in last.items()]


def _runs(numbers: Sequence[int]) -> str:
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return runs[0] if runs == [str(numbers[0])] else f"{{{','.join(runs)}}}"
