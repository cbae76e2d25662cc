"""Rows for trials against loops over plain lists: every token scored once, the rarest tokens, repeats inserted."""

from collections import Counter

import builders
import numpy as np
import pytest
import torch

from tapernorm_lab.experiments.odd_inputs import rows as odd_rows
from tapernorm_lab.experiments.odd_inputs.rows import (
    never_seen,
    rarest,
    text_rows,
    token_counts,
    with_repeats,
)

CONTEXT = 7


def stream(length, high=50, seed=1, dtype=torch.uint16):
    return torch.randint(high, (length,), generator=builders.generator(seed, "stream")).to(dtype)


@pytest.mark.parametrize("length", [8, 14, 15, 16, 100])
def test_windows_score_every_token_but_the_first_once(length):
    ids = stream(length)
    rows = text_rows(ids, CONTEXT, seed=0, limit=1000)
    assert rows.dtype == torch.int64
    assert rows.shape == ((length - 1) // CONTEXT, CONTEXT + 1)
    assert rows[:, 1:].flatten().tolist() == ids.tolist()[1 : 1 + len(rows) * CONTEXT]
    assert rows[1:, 0].tolist() == rows[:-1, -1].tolist()  # the last target is read again, as the next one's input


def test_fewer_windows_are_drawn_from_all_and_kept_in_their_order():
    ids = stream(700)
    every = [tuple(row) for row in text_rows(ids, CONTEXT, seed=0, limit=1000).tolist()]
    some, again, other = (
        [tuple(row) for row in text_rows(ids, CONTEXT, seed=seed, limit=20).tolist()] for seed in (0, 0, 1)
    )
    places = [every.index(row) for row in some]
    assert places == sorted(set(places))
    assert len(places) == 20
    assert max(places) > 60  # of 99: not the first ones
    assert some == again != other


def test_a_stream_without_a_window_is_refused():
    with pytest.raises(ValueError, match="7 tokens holds no window of 7"):
        text_rows(stream(7), CONTEXT, seed=0, limit=5)


@pytest.mark.parametrize("chunk", [5, 1 << 22])
def test_tokens_are_counted_across_chunks(monkeypatch, chunk):
    monkeypatch.setattr(odd_rows, "_CHUNK", chunk)
    ids = stream(123, high=20)
    found = token_counts(ids, 33)
    assert found.tolist() == np.bincount(ids.numpy().astype(int), minlength=33).tolist()
    assert found.sum() == 123


def test_the_rarest_are_those_that_occur_least_but_occur():
    ids = stream(400, high=40).tolist()
    counted = Counter(ids)
    barred = min(counted, key=lambda i: (counted[i], i))  # the very rarest
    expected = sorted((i for i in counted if i != barred), key=lambda i: (counted[i], i))
    counts = token_counts(torch.tensor(ids), 60)
    assert rarest(counts, 9, barred=barred).tolist() == expected[:9]
    assert rarest(counts, 1000, barred=barred).tolist() == expected
    assert counts[barred] > 0  # the caller's counts are not touched
    assert never_seen(counts).tolist() == [i for i in range(60) if i not in counted]


def test_repeats_are_inserted_and_the_end_of_the_row_is_cut_off():
    rows = torch.arange(4 * 13).view(4, 13)
    candidates = torch.tensor([1000, 1001, 1002])
    found = with_repeats(rows, candidates, place=3, times=4, seed=0, stream="repeats").tolist()
    for row, made in zip(rows.tolist(), found, strict=True):
        (token,) = set(made[3:7])
        assert token in candidates
        assert made == row[:3] + [token] * 4 + row[3:9]
        assert made != row[:3] + [token] * 4 + row[7:]  # what overwriting the text would give


def test_tokens_are_drawn_for_each_row_by_seed_and_stream():
    rows, candidates = torch.zeros(200, 5, dtype=torch.int64), torch.arange(10, 20)
    drawn = {
        (seed, stream): with_repeats(rows, candidates, place=2, times=1, seed=seed, stream=stream)[:, 2].tolist()
        for seed in (0, 1)
        for stream in ("a", "b")
    }
    assert len({tuple(tokens) for tokens in drawn.values()}) == 4
    for tokens in drawn.values():
        assert set(tokens) == set(candidates.tolist())
    again = with_repeats(rows, candidates, place=2, times=1, seed=0, stream="a")[:, 2].tolist()
    assert again == drawn[0, "a"]
