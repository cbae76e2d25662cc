"""A decoder packed for incremental decoding: q, k, v in one matrix, gate and up in another, and no identity modules.

B batch, T time, D d_model, H heads, K key-value heads, E head size, S cache capacity, V vocabulary.

Packing changes nothing but the order of sums, unless int8 weights are requested.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .decoder import Block, Decoder, RotaryTable
from .kv_cache import KVCache
from .packed_linear import Int8Linear, PackedLinear

Weights = Literal["stored", "int8"]  # in the model's dtype, or int8 with a scale for each output channel
_LINEAR: dict[Weights, Callable[..., nn.Module]] = {"stored": PackedLinear, "int8": Int8Linear}
Position = int | Tensor  # of the first token: an int lets eager mode slice, a tensor () keeps one graph


class PackedBlock(nn.Module):
    """One block of a `PackedDecoder`."""

    def __init__(self, block: Block, n_head: int, n_kv_head: int, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = n_head, n_kv_head
        self.grouped = n_head != n_kv_head
        attention, mlp = block.self_attn, block.mlp
        self.qkv = linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = linear(attention.o_proj)
        self.gate_up = linear(mlp.gate_proj, mlp.up_proj)
        self.down = linear(mlp.down_proj)
        self.attention_norm = _working(block.input_layernorm)
        self.mlp_norm = _working(block.post_attention_layernorm)

    def forward(
        self,
        h: Tensor,
        cos: Tensor,
        sin: Tensor,
        cached: tuple[Tensor, Tensor] | None,
        position: Position,
        mask: Tensor | None,
    ) -> Tensor:
        """Apply the block to h (B, T, D), and write the T new keys and values at `position` of the cache, if any."""
        x = h if self.attention_norm is None else self.attention_norm(h)
        q, keys, values = self._heads(self.qkv(x), cos, sin)
        if cached is not None:
            keys, values = _write(cached[0], keys, position), _write(cached[1], values, position)
        causal = mask is None and q.shape[2] > 1
        y = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=self.grouped
        )  # (B, H, T, E)
        h = h + self.out(y.transpose(1, 2).flatten(2))
        x = h if self.mlp_norm is None else self.mlp_norm(h)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return h + self.down(F.silu(gate) * up)

    def _heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split x (B, T, (H + 2 K) E) into q, k and v, and rotate q and k.

        q is (B, H, T, E), and k and v are (B, K, T, E).
        """
        heads = x.unflatten(-1, (self.n_head + 2 * self.n_kv_head, -1)).transpose(1, 2)
        qk, v = heads.split((self.n_head + self.n_kv_head, self.n_kv_head), dim=1)
        left, right = qk.chunk(2, dim=-1)
        qk = torch.addcmul(qk * cos, torch.cat((right, left), dim=-1), sin)
        q, k = qk.split((self.n_head, self.n_kv_head), dim=1)
        return q, k, v


class PackedDecoder(nn.Module):
    """Incremental form of a `Decoder`, which may be tapered at any gate or folded.

    Weights that need no packing are shared with the `Decoder`.

    Args:
        model: the decoder to pack.
        weights: format of the weights of all linear maps, including the head. "int8" rounds the inputs and outputs of
            these maps to bfloat16. Residual stream, attention and norms keep the model's dtype. See `Int8Linear`.

    Raises:
        UserError: "int8" was requested for a model on another device than a CPU, or with weights that are not finite.
    """

    def __init__(self, model: Decoder, *, weights: Weights = "stored") -> None:
        super().__init__()
        config, linear = model.config, _LINEAR[weights]
        self.config = config
        self.embed = model.model.embed_tokens
        blocks = [block for block in model.model.layers if isinstance(block, Block)]
        self.blocks = nn.ModuleList(PackedBlock(block, config.n_head, config.n_kv_head, linear) for block in blocks)
        self.norm = _working(model.model.norm)
        self.head = linear(model.lm_head)
        self.rotary: RotaryTable = blocks[0].self_attn.rotary

    def forward(self, tokens: Tensor, cache: KVCache | None = None, position: Position = 0) -> Tensor:
        """Return the logits (B, V) after the last of `tokens` (B, T), whose first stands at `position` of the cache.

        With a tensor position, attention reads the whole cache under a mask, so that one graph serves every step. With
        an int, it reads the filled part. Without a cache, it reads `tokens` alone.

        Raises:
            ValueError: the tokens exceed the cache, or without a cache the context. Or their rows do not match the
                cache's.
        """
        self._require_room(tokens, cache, position)
        h = self.embed(tokens)  # (B, T, D)
        cos, sin, mask = self._geometry(tokens, cache, position, h.dtype)
        for index, block in enumerate(self.blocks):
            cached = None if cache is None else (cache.keys[index], cache.values[index])
            h = block(h, cos, sin, cached, position, mask)
        h = h[:, -1]
        return self.head(h if self.norm is None else self.norm(h))

    def _require_room(self, tokens: Tensor, cache: KVCache | None, position: Position) -> None:
        rows, length = tokens.shape
        room = self.config.context if cache is None else cache.capacity
        if isinstance(position, int) and position + length > room:  # index_copy_ checks a tensor, without a device sync
            raise ValueError(f"{length} tokens at position {position} exceed the capacity of {room} tokens")
        if cache is not None and rows != len(cache.keys[0]):
            raise ValueError(f"{rows} rows of tokens do not fit a cache of {len(cache.keys[0])} sequences")

    def _geometry(
        self, tokens: Tensor, cache: KVCache | None, position: Position, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return cos, sin and the attention mask. The mask is None if attention is plainly causal.

        cos and sin are (T, E), or (B, 1, T, E) if pads shift the rows.
        """
        length = tokens.shape[1]
        pads = None if cache is None else cache.pads
        if pads is None and isinstance(position, int) and (position == 0 or length == 1):
            here = slice(position, position + length)
            return self.rotary.cos[here].to(dtype), self.rotary.sin[here].to(dtype), None
        assert cache is not None
        columns = position + torch.arange(length, device=tokens.device)  # (T,)
        shifted = columns if pads is None else (columns - pads[:, None]).clamp_min(0)[:, None]  # (T,) or (B, 1, T)
        mask = self._mask(columns, cache, position)
        return self.rotary.cos[shifted].to(dtype), self.rotary.sin[shifted].to(dtype), mask

    def _mask(self, columns: Tensor, cache: KVCache, position: Position) -> Tensor:
        """Return which cache columns each token attends to, (B or 1, 1, T, S) bool.

        A pad token attends to itself, so that its softmax is not empty.
        """
        seen = cache.capacity if isinstance(position, Tensor) else position + len(columns)
        slots = torch.arange(seen, device=columns.device)
        visible = (slots <= columns[:, None])[None]  # (1, T, S)
        if cache.pads is not None:
            visible = visible & (slots >= cache.pads[:, None, None]) | (slots == columns[:, None])
        return visible[:, None]


def _working(norm: nn.Module) -> nn.Module | None:
    return None if isinstance(norm, nn.Identity) else norm


def _write(cached: Tensor, new: Tensor, position: Position) -> Tensor:
    """Write `new` (B, K, T, E) at `position`, and return what attention reads: the filled part, or all with a mask."""
    length = new.shape[2]
    if isinstance(position, Tensor):
        cached.index_copy_(2, position + torch.arange(length, device=new.device), new)
        return cached
    cached[:, :, position : position + length] = new
    return cached[:, :, : position + length]
