"""The loss of a training step, optionally compiled, and activation checkpointing."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapernorm.architectures import hidden_of, output_head
from tapernorm.models.decoder import Decoder
from tapernorm.util.compiler import has_compiler

from ..models.output_head import IGNORED, head_cross_entropy
from .norm_driver import NormDriver
from .ranks import leads

_MOST_FORMS = 8  # most forms of a model's norms for which compilation saves time


def next_tokens(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of blocks, both (B, T). The last token of a block has no target.

    End-of-text is a target like any other token.
    """
    targets = torch.full_like(rows, IGNORED)
    targets[:, :-1] = rows[:, 1:]
    return rows, targets


def cross_entropy(logits: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in nats of targets (..., T) and logits (..., T, V), computed in float32 or wider.

    `IGNORED` targets do not count.

    Args:
        logits: (..., T, V).
        targets: (..., T) int64.
        reduction: mean or sum for a scalar; none for one loss per target, flattened.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.flatten(0, -2).to(wide)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def checkpoint_activations(model: nn.Module) -> None:
    """Switch on activation checkpointing: each block runs again in the backward pass, with the same dropout."""
    if isinstance(model, Decoder):
        model.model.checkpoint_activations = True
    else:
        stock: Any = model
        stock.activation_checkpointing_enable({"use_reentrant": False})


def training_loss(
    model: nn.Module, driver: NormDriver | None, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (CE, weighted auxiliary loss, input (B, T, D) of the output head) of tokens (B, T).

    `hardware.compile` compiles this function.
    """
    hidden = hidden_of(model, inputs)
    ce = head_cross_entropy(output_head(model), hidden, targets)
    aux = ce.new_zeros(()) if driver is None else driver.auxiliary_loss(inputs)
    return ce, aux, hidden


def compiled_loss(
    driver: NormDriver | None, device: torch.device, label: str
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Compile `training_loss`: one graph per form of the norms, for whole micro-batches and for a smaller last one.

    On a CPU without a C++ compiler the loss stays eager. So do norms with many forms, because compilation would take
    longer than the training. FakeLN's have one form per removal.
    """
    if not has_compiler(device):
        if leads():
            print(f"{label}: not compiled, torch.compile needs a C++ compiler on a CPU: install g++", file=sys.stderr)
        return training_loss
    forms = 1 if driver is None else driver.forms
    if forms > _MOST_FORMS:
        if leads():
            print(f"{label}: not compiled, because its norms take {forms} forms with one graph each", file=sys.stderr)
        return training_loss
    compiler: Any = torch.compile  # its annotations lack recompile_limit
    return compiler(training_loss, dynamic=False, recompile_limit=2 * forms)
