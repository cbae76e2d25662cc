"""Names of modules written short, and read back by hand."""

import random
from fnmatch import fnmatchcase

import pytest

from tapernorm.util.module_names import in_braces, of_blocks, patterns


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.3.b", "a.4.b", "a.5.b", "a.7.b", "n"], ["a.{3-5,7}.b", "n"]),
        (["a.10.b", "a.9.b"], ["a.{9-10}.b"]),
        (["a.0.b"], ["a.0.b"]),
        (["a.1.b", "a.1.c", "a.2.c"], ["a.1.b", "a.{1-2}.c"]),
        (["a.1.in_norm", "a.1.out_norm", "a.2.in_norm", "a.2.out_norm"], ["a.{1-2}.{in,out}_norm"]),
        (["a.1.b", "c.1.b"], ["a.1.b", "c.1.b"]),
        ([], []),
    ],
)
def test_names_of_the_same_blocks_are_written_as_one(names, expected):
    assert of_blocks(names) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["q_proj", "k_proj", "v_proj"], "{q,k,v}_proj"),
        (["mlp.gate_proj", "mlp.up_proj"], "mlp.{gate,up}_proj"),
        (["c_fc"], "c_fc"),
        (["aa", "aaa"], "aa{,a}"),
        (["ab", "cd"], "{ab,cd}"),
    ],
)
def test_names_that_begin_and_end_alike_are_written_as_one(names, expected):
    assert in_braces(names) == expected


@pytest.mark.parametrize("seed", range(12))
def test_patterns_match_the_chosen_names_and_no_others(seed):
    draw = random.Random(seed)
    among = [f"layers.{block}.{norm}" for block in range(draw.choice((4, 13, 112))) for norm in ("ln_1", "ln_2")]
    chosen = [name for name in among if draw.random() < 0.6]
    found = patterns(chosen, among)
    assert [name for name in among if any(fnmatchcase(name, pattern) for pattern in found)] == chosen


def test_whole_blocks_are_one_pattern():
    among = [f"layers.{block}.{norm}" for block in range(30) for norm in ("ln_1", "ln_2")]
    chosen = [name for name in among if int(name.split(".")[1]) in (0, 1, 2, 10, 11)]
    assert patterns(chosen, among) == ["layers.[012].*", "layers.1[01].*"]
    assert patterns([], among) == []
