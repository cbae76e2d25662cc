"""The loss of a training step, compiled where asked, and what its forward pass keeps for the backward pass."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapernorm.architectures import hidden_of, output_head
from tapernorm.models.decoder import Decoder
from tapernorm.util.compiler import require_compiler

from .norm_driver import NormDriver
from .output_head import IGNORED, head_cross_entropy
from .ranks import leads

_MOST_FORMS = 8  # of a model's norms, for which compiling each pays


def next_tokens(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets of blocks (B, T): the last token of a block has no target, end-of-text is one like others."""
    targets = torch.full_like(rows, IGNORED)
    targets[:, :-1] = rows[:, 1:]
    return rows, targets


def cross_entropy(logits: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    """Nats of targets (..., T) by logits (..., T, V), in float32 or wider; `IGNORED` targets do not count.

    Args:
        reduction: mean or sum, a scalar; none: a loss for each target, (... T,).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.flatten(0, -2).to(wide)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def checkpoint_activations(model: nn.Module) -> None:
    """Keep no activation inside a block: each block runs again in the backward pass, with the same dropout."""
    if isinstance(model, Decoder):
        model.model.checkpoint_activations = True
    else:
        stock: Any = model
        stock.activation_checkpointing_enable({"use_reentrant": False})


def training_loss(
    model: nn.Module, driver: NormDriver | None, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(CE, weighted auxiliary loss, input (B, T, D) of the output head) of tokens (B, T).

    This is the function that `compile: true` compiles.
    """
    hidden = hidden_of(model, inputs)
    ce = head_cross_entropy(output_head(model), hidden, targets)
    aux = ce.new_zeros(()) if driver is None else driver.auxiliary_loss(inputs)
    return ce, aux, hidden


def compiled_loss(
    driver: NormDriver | None, device: torch.device, label: str
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`training_loss`, a graph for each form of the norms, for whole micro-batches and for a smaller last one.

    Norms of many forms, FakeLN's with one after every removal, stay eager: compiling would outlast the training.
    """
    require_compiler(device)
    forms = 1 if driver is None else driver.forms
    if forms > _MOST_FORMS:
        if leads():
            print(f"{label}: not compiled, its norms take {forms} forms, a graph each", file=sys.stderr)
        return training_loss
    compiler: Any = torch.compile  # its annotations lack recompile_limit
    return compiler(training_loss, dynamic=False, recompile_limit=2 * forms)
