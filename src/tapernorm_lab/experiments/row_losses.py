"""Cross-entropy row by row, and the statistics that show its tail (method.md section 11).

A few rows can dominate a mean over rows: three rows of 10,000 raised a published model's mean from about 2.5 to 130.
B rows of a batch, T tokens of a row, V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.architectures import logits_of
from tapernorm.util.module_modes import evaluating
from tapernorm.util.progress import tracked

from ..training.training_loss import cross_entropy
from .loss_quantiles import comparable, quantile, rounded

TAIL = 0.999
TRIM = 40  # a trimmed mean drops 1/40 of the rows at either end, 5 % in all
WORST = 10


@dataclass(frozen=True)
class RowScores:
    """The mean loss of every row over its T - 1 targets, and the losses of single targets; on the CPU, nats/token."""

    rows: Tensor  # (n,) float64
    tokens: Tensor  # (n (T - 1),) float32, `rounded`, unordered

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of rows and of tokens that tables report, in nats/token.

        A loss that is not finite counts as larger than any number. Mean and maximum are then None, and so is a quantile
        that reaches such a loss.
        """
        n = len(self.rows)
        cut = n // TRIM
        mean = self.rows.mean()  # equals the mean over tokens, because all rows have the same length
        rows = {
            "mean": mean,
            "median": quantile(comparable(self.rows), 0.5),
            "trimmed_mean": self._sorted[cut : n - cut].mean() + 0 * mean,  # no trimmed mean if a row is not finite
            "p99_9": quantile(comparable(self.rows), TAIL),
            "max": self._sorted[-1],
            "std": self.rows.std() if n > 1 else math.nan,
        }
        tokens = {"mean": mean, "median": quantile(self.tokens, 0.5), "p99_9": quantile(self.tokens, TAIL)}
        return {
            "rows": {**_numbers(rows), "nonfinite": int((~self.rows.isfinite()).sum())},
            "tokens": _numbers(tokens),
        }

    def worst(self, count: int = WORST) -> list[tuple[int, float | None]]:
        """Return index and mean loss of the worst rows, worst first; rows without a finite loss lead."""
        order = torch.argsort(comparable(self.rows), descending=True, stable=True)[:count].tolist()
        return [(index, _number(self.rows[index])) for index in order]

    @cached_property
    def _sorted(self) -> Tensor:
        return self.rows.sort().values  # NaN last


@torch.no_grad()
def score_rows(model: nn.Module, rows: Tensor, *, batch: int, device: torch.device) -> RowScores:
    """Score rows of ids (n, T), each by itself: the model sees its T tokens, the last T - 1 are targets, all of them.

    Runs in the model's own dtype, losses in float32 or wider. Memory is that of one batch, 4 bytes a target and
    8 a row; `rows` may be memory-mapped. The model is in eval mode for the pass, and nothing of it changes.

    Raises:
        ValueError: there is no row, or no target in it.
    """
    if rows.ndim != 2 or len(rows) == 0 or rows.shape[1] < 2:
        raise ValueError(f"rows to score are (n, T) with n >= 1 and T >= 2, got {tuple(rows.shape)}")
    targets = rows.shape[1] - 1
    scores = RowScores(torch.empty(len(rows), dtype=torch.float64), torch.empty(len(rows) * targets))
    with evaluating(model):
        for first in tracked(range(0, len(rows), batch), "scoring", math.ceil(len(rows) / batch)):
            ids = rows[first : first + batch].to(torch.int64).to(device)  # (B, T)
            losses = target_losses(logits_of(model, ids), ids)  # (B, T - 1)
            scores.rows[first : first + len(ids)] = losses.to(torch.float64).mean(dim=1).cpu()
            scores.tokens[first * targets : (first + len(ids)) * targets] = rounded(losses).flatten().cpu()
    return scores


def target_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the cross-entropy (B, T-1) of logits (B, T, V) at every id (B, T) but the first, in float32 or wider."""
    # Row by row, so that memory does not hold logits and their log-softmax for the whole batch.
    pairs = zip(logits, ids, strict=True)
    return torch.stack([cross_entropy(z[:-1], row[1:], reduction="none") for z, row in pairs])


def _number(value: Tensor | float) -> float | None:
    """Return a number for JSON, or None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def _numbers(values: dict[str, Any]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}
