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
    """Summed cross-entropy of `tokens` targets, whose text has `bytes` UTF-8 bytes (None: unknown)."""

    nats: float
    tokens: int
    bytes: int | None

    @property
    def ce(self) -> float:
        """Mean cross-entropy, nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Total bits over the bytes of the text, comparable across tokenizers; document ends add bits but no bytes."""
        return None if self.bytes is None else self.nats / math.log(2) / self.bytes

    def row(self) -> dict[str, float]:
        """Return the entries of a metrics row."""
        known = {} if self.bits_per_byte is None else {"bits_per_byte": self.bits_per_byte}
        return {"valid_ce": self.ce, **known}


def scoring_windows(tokens: Tensor, *, context: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield non-overlapping windows (inputs, targets), each (b, t) int64, that score every token but the first once.

    The last, shorter window has a batch of its own.
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
    """Score a token stream (n,) in non-overlapping windows; every token but the first is a target."""
    windows = scoring_windows(tokens, context=context, batch=batch)
    nats = _cross_entropy_sum(model, windows, device, total=math.ceil((len(tokens) - 1) / context / batch))
    return Evaluation(nats, len(tokens) - 1, text_bytes)


def evaluate_blocks(model: nn.Module, rows: Tensor, *, batch: int, device: torch.device) -> Evaluation:
    """Score blocks (n, T), each row independently, with T - 1 targets per row."""
    pieces = ((part, part[:, 1:]) for part in (some.to(torch.int64) for some in rows.split(batch)))
    nats = _cross_entropy_sum(model, pieces, device, total=math.ceil(len(rows) / batch))
    return Evaluation(nats, rows.shape[0] * (rows.shape[1] - 1), None)


@torch.no_grad()
def _cross_entropy_sum(
    model: nn.Module, pieces: Iterable[tuple[Tensor, Tensor]], device: torch.device, *, total: int
) -> float:
    """Return the summed cross-entropy in nats of all targets, with the model in eval mode.

    A piece is ids (b, t) and the targets (b, s) of their first s <= t positions. There are about `total` pieces, which
    are dealt out to the ranks.
    """
    nats = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(model):
        for inputs, targets in dealt(tracked(pieces, "validation", total, shown=leads())):
            logits = logits_of(model, inputs.to(device))[:, : targets.shape[1]]
            nats += cross_entropy(logits, targets.to(device), reduction="sum")
    sum_over_ranks([nats])
    return nats.item()
