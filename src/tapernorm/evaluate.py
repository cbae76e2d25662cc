"""Validation cross-entropy over a whole token stream (method.md section 11)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Evaluation:
    """Summed cross-entropy of `tokens` targets whose text is `bytes` UTF-8 bytes long."""

    nats: float
    tokens: int
    bytes: int

    @property
    def ce(self) -> float:
        """Mean cross-entropy, nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers: total bits over the bytes of the text, document ends costing bits only."""
        return self.nats / math.log(2) / self.bytes


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


@torch.no_grad()
def evaluate(
    logits_of: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    text_bytes: int,
    context: int,
    batch: int,
    device: torch.device,
) -> Evaluation:
    """Score a token stream (n,) in float32 or wider, in non-overlapping windows; all targets but the first token count.

    `logits_of` maps ids (b, t) to logits (b, t, V); a module is put into eval mode for the pass and back.
    """
    module = logits_of if isinstance(logits_of, nn.Module) else None
    training = module is not None and module.training
    if module is not None:
        module.eval()
    nats = torch.zeros((), dtype=torch.float64, device=device)
    try:
        for inputs, targets in scoring_windows(tokens, context=context, batch=batch):
            logits = logits_of(inputs.to(device)).flatten(0, 1)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            nats += F.cross_entropy(wide, targets.to(device).flatten(), reduction="sum")
    finally:
        if module is not None:
            module.train(training)
    return Evaluation(nats.item(), len(tokens) - 1, text_bytes)
