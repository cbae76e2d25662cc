"""Random streams as a pure function of (seed, name)."""

import re

import pytest
import torch
from places import ROOT

from tapernorm.util.rng import generator, seed_dropout


def draw(seed, stream):
    return torch.randint(2**62, (4,), generator=generator(seed, stream))


def test_the_same_seed_and_stream_give_the_same_numbers_whatever_was_drawn_before():
    first = draw(1, "init")
    draw(2, "init"), torch.rand(3)
    assert torch.equal(draw(1, "init"), first)


@pytest.mark.parametrize(("seed", "stream"), [(2, "init"), (1, "windows/0"), (11, "init"), (1, "Init")])
def test_another_seed_or_stream_gives_other_numbers(seed, stream):
    assert not torch.equal(draw(seed, stream), draw(1, "init"))


def test_the_numbers_are_pinned_across_releases():
    assert torch.randint(1000, (5,), generator=generator(1, "init")).tolist() == [290, 707, 26, 638, 235]


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    draw(1, "init")
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_seeded_as_torch_would_and_leaves_nothing_behind():
    number = generator(3, "dropout/7").initial_seed()
    torch.manual_seed(number)
    wanted = torch.rand(5)
    queued = len(torch.cuda._queued_calls)  # what torch.manual_seed adds to, call by call, where CUDA is not in use
    for step in (6, 7):
        seed_dropout(3, step)
    assert torch.equal(torch.rand(5), wanted)
    assert len(torch.cuda._queued_calls) == queued


def test_no_other_file_creates_or_seeds_a_generator():
    creates = re.compile(r"torch\.Generator\(|manual_seed|default_rng|random\.seed|RandomState")
    files = [path for package in ("tapernorm", "tapernorm_lab") for path in (ROOT / "src" / package).rglob("*.py")]
    assert len(files) > 100
    guilty = [path.relative_to(ROOT / "src").as_posix() for path in files if creates.search(path.read_text())]
    assert guilty == ["tapernorm/util/rng.py"]
