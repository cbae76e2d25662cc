"""What int8 weights and bfloat16 activations cost a finished decoder, each alone and together.

B rows, T positions.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapernorm.checkpoints.store import load
from tapernorm.models.decoder import Decoder
from tapernorm.models.packed_linear import Int8Linear, quantise
from tapernorm.util.atomic_files import sha256_of

from ..data.token_stream import TokenStream
from ..training.device import take_device
from ..training.run_folder import require_vocabulary
from ..training.validation_loss import evaluate

TOKENS = 65_536  # that are scored at most: all cells score the same, so that their difference needs few
_BATCH = 16  # windows


class Int8Weights(nn.Module):
    """A linear map with the int8 weights of `Int8Linear`, computed in float32 throughout."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        q, scale = quantise(layer.weight)
        self.weight, self.bias = q.float() * scale.float()[:, None], layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Bfloat16Activations(nn.Module):
    """A linear map with its own weights and the activations of `Int8Linear`: bfloat16 in and out, float32 sums."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.bfloat16().float(), self.weight).bfloat16().float()
        return y if self.bias is None else y + self.bias


CELLS: dict[str, Callable[[nn.Linear], nn.Module]] = {  # what stands in the place of each linear map, the head's too
    "float32": lambda layer: layer,
    "int8": Int8Weights,
    "bfloat16": Bfloat16Activations,
    "both": Int8Linear,
}


def int8_losses(folder: Path, tokens: Path, *, threads: int) -> dict[str, Any]:
    """Validation losses of the model in `folder` in every cell, as ce_NAME in nats per token, on a CPU.

    Also what was scored: tokens, and sha256 of the weights.

    Args:
        tokens: token stream of the model's tokenizer; the first `TOKENS` targets of its validation split are scored.

    Raises:
        UserError: there is no such model, it has another vocabulary than the tokens, or weights that are not finite.
    """
    cpu = take_device("cpu", threads)
    stream = TokenStream.open(tokens, "valid")
    model = load(folder, Decoder).float().to(cpu)
    require_vocabulary(model.config.vocab_size, stream.manifest, tokens)
    scored = stream.tokens[: TOKENS + 1]

    def loss(make: Callable[[nn.Linear], nn.Module]) -> float:
        found = evaluate(
            with_linear(model, make),
            scored,
            text_bytes=stream.split["bytes"],
            context=model.config.context,
            batch=_BATCH,
            device=cpu,
        )
        return found.ce

    return {
        "tokens": len(scored) - 1,
        **{f"ce_{name}": loss(make) for name, make in CELLS.items()},
        "weights_sha256": sha256_of(folder / "model.safetensors")[:12],
    }


@torch.no_grad()
def with_linear(model: Decoder, make: Callable[[nn.Linear], nn.Module]) -> Decoder:
    """A copy of `model` with `make` of each linear map in its place; the embedding stays, tied or not."""
    made = copy.deepcopy(model).requires_grad_(False)
    for name, module in list(made.named_modules()):
        if isinstance(module, nn.Linear):
            made.set_submodule(name, make(module))
    return made
