"""Validation cross-entropy over a whole token stream, or over blocks (method.md section 11)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tapernorm.architectures import logits_of
from tapernorm.util.distributed import sum_over_ranks
from tapernorm.util.module_modes import evaluating
from tapernorm.util.progress import tracked

from .ranks import dealt, leads
from .training_loss import cross_entropy


@dataclass(frozen=True)
class Evaluation:
    """Summed cross-entropy of `tokens` targets whose text is `bytes` UTF-8 bytes long (None: not known)."""

    nats: float
    tokens: int
    bytes: int | None

    @property
    def ce(self) -> float:
        """Mean cross-entropy, nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable across tokenizers: total bits over the bytes of the text, document ends costing bits only."""
        return None if self.bytes is None else self.nats / math.log(2) / self.bytes

    def row(self) -> dict[str, float]:
        """What a line of metrics says of it."""
        known = {} if self.bits_per_byte is None else {"bits_per_byte": self.bits_per_byte}
        return {"valid_ce": self.ce, **known}


def scoring_windows(tokens: Tensor, *, context: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Non-overlapping windows (inputs, targets), each (b, t) int64, that score every token but the first once.

    The last, shorter window comes alone.
    """
    targets = len(tokens) - 1
    full = targets // context
    for first in range(0, full, batch):
        rows = min(batch, full - first)
        piece = tokens[first * context : (first + rows) * context + 1].to(torch.int64)
        yield piece[:-1].view(rows, context), piece[1:].view(rows, context)
    if full * context < targets:
        piece = tokens[full * context :].to(torch.int64)
        yield piece[None, :-1], piece[None, 1:]


def evaluate(
    model: nn.Module, tokens: Tensor, *, text_bytes: int, context: int, batch: int, device: torch.device
) -> Evaluation:
    """Score a token stream (n,) in non-overlapping windows; all targets but the first token count."""
    windows = scoring_windows(tokens, context=context, batch=batch)
    nats = _cross_entropy_sum(model, windows, device, total=math.ceil((len(tokens) - 1) / context / batch))
    return Evaluation(nats, len(tokens) - 1, text_bytes)


def evaluate_blocks(model: nn.Module, rows: Tensor, *, batch: int, device: torch.device) -> Evaluation:
    """Score blocks (n, T), each by itself: T - 1 targets a row, every row counted."""
    pieces = ((part, part[:, 1:]) for part in (some.to(torch.int64) for some in rows.split(batch)))
    nats = _cross_entropy_sum(model, pieces, device, total=math.ceil(len(rows) / batch))
    return Evaluation(nats, rows.shape[0] * (rows.shape[1] - 1), None)


@torch.no_grad()
def _cross_entropy_sum(
    model: nn.Module, pieces: Iterable[tuple[Tensor, Tensor]], device: torch.device, *, total: int
) -> float:
    """Nats of all targets; pieces, about `total`, are ids (b, t) and the targets (b, s <= t) of their first s.

    The model is in eval mode for the pass. The ranks that train it deal the pieces out among them.
    """
    nats = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(model):
        for inputs, targets in dealt(tracked(pieces, "validation", total, shown=leads())):
            logits = logits_of(model, inputs.to(device))[:, : targets.shape[1]]
            nats += cross_entropy(logits, targets.to(device), reduction="sum")
    sum_over_ranks([nats])
    return nats.item()
