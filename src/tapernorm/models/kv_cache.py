"""The static key-value cache of incremental decoding, allocated once and written in place.

B batch, K key-value heads, S capacity in tokens, E head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tapernorm.models.decoder_config import DecoderConfig

from ..util.errors import UserError


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, and the number of leading pad tokens in each row."""

    keys: list[Tensor]  # per layer (B, K, S, E)
    values: list[Tensor]  # per layer (B, K, S, E)
    pads: Tensor | None  # (B,) number of pad tokens before each prompt; None: no row has any

    @classmethod
    def allocate(
        cls,
        config: DecoderConfig,
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        pads: Tensor | None = None,
    ) -> "KVCache":
        """Allocate an empty cache for `batch` sequences of up to `capacity` tokens.

        Raises:
            UserError: the capacity exceeds the model's context.
        """
        if capacity > config.context:
            raise UserError(
                f"a cache of {capacity} tokens exceeds the model's context of {config.context}: "
                "shorten the prompt, or ask for fewer new tokens"
            )
        shape = (batch, config.n_kv_head, capacity, config.head_dim)
        keys, values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layer)] for _ in range(2)
        )
        if pads is not None and not bool(pads.any()):
            pads = None
        return cls(keys, values, pads)

    @property
    def capacity(self) -> int:
        """Largest number of tokens in a row, S."""
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Size of all keys and values, in bytes."""
        return sum(t.nbytes for t in [*self.keys, *self.values])
