"""Rows that finished models are tried on: held-out text in windows, and such windows with a rare token repeated.

n rows, T tokens that a model reads, V vocabulary. A row holds T + 1 ids: the model reads the first T, and at each of
their positions 0 ... T - 1 it is asked for the id that follows.
"""

import torch
from torch import Tensor

from tapernorm.util.rng import generator

_CHUNK = 1 << 22  # ids counted at once


def text_rows(tokens: Tensor, context: int, *, seed: int, limit: int) -> Tensor:
    """(n, T+1) int64 windows of a stream (m,) that score every token but the first once, at most `limit` of them.

    Where there are more, those kept are drawn from all, in their order; the last, shorter window is left out.

    Raises:
        ValueError: the stream is shorter than one window.
    """
    count = (len(tokens) - 1) // context
    if count < 1:
        raise ValueError(f"a stream of {len(tokens)} tokens holds no window of {context} + 1")
    chosen = torch.arange(count)
    if limit < count:
        chosen = torch.randperm(count, generator=generator(seed, f"rows/{context}"))[:limit].sort().values
    return torch.stack([tokens[i * context : (i + 1) * context + 1].to(torch.int64) for i in chosen.tolist()])


def token_counts(tokens: Tensor, vocabulary: int) -> Tensor:
    """(V,) int64: how often each id stands in a stream, which may be memory-mapped."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for first in range(0, len(tokens), _CHUNK):
        counts += torch.bincount(tokens[first : first + _CHUNK].to(torch.int64), minlength=vocabulary)
    return counts


def rarest(counts: Tensor, number: int, *, barred: int) -> Tensor:
    """(k,) the `number` rarest ids among those that occur, rarest first, the smaller id first; `barred` is left out."""
    known = counts.clone()
    known[barred] = 0
    order = torch.argsort(known, stable=True)
    return order[known[order] > 0][:number]


def never_seen(counts: Tensor) -> Tensor:
    """(k,) the ids that do not occur."""
    return (counts == 0).nonzero().flatten()


def with_repeats(rows: Tensor, candidates: Tensor, *, place: int, times: int, seed: int, stream: str) -> Tensor:
    """(n, T+1) rows in which one token, drawn for each row, stands `times` times from position `place` on.

    It is inserted: what stood there follows, and the row's end is cut off.
    """
    drawn = torch.randint(len(candidates), (len(rows),), generator=generator(seed, stream))
    runs = candidates[drawn][:, None].expand(-1, times)
    return torch.cat((rows[:, :place], runs, rows[:, place : rows.shape[1] - times]), dim=1)
