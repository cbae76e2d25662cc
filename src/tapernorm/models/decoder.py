"""The pre-norm decoder of the TinyStories track, with Hugging Face LLaMA parameter names.

B batch, T time, D d_model, H heads, K key-value heads, E head size, F feed-forward width, V vocabulary.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tapernorm.models.decoder_config import DecoderConfig

from ..norms import LayerNorm, RMSNorm
from ..util.wide_buffers import WideBuffers


class RotaryTable(WideBuffers):
    """Rotary positions: channels i and i + E/2 of a head turn by the angle t * theta^(-2i/E).

    cos (context, E) repeats for both halves of a head; sin is negated in the first half.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        positions = torch.arange(config.context, dtype=torch.float64)
        angles = torch.outer(positions, config.rope_theta**-exponents)  # (context, E/2)
        cos, sin = angles.cos().float(), angles.sin().float()
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate x (B, H, T, E) at positions 0 ... T-1."""
        cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))
        left, right = x.chunk(2, dim=-1)
        return torch.addcmul(x * cos, torch.cat((right, left), dim=-1), sin)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, without biases."""

    def __init__(self, config: DecoderConfig, rotary: RotaryTable) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.n_kv_head != config.n_head
        kv_width = config.n_kv_head * config.head_dim
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(
            self.rotary(q), self.rotary(k), v, is_causal=True, enable_gqa=self.grouped
        )  # (B, H, T, E)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, T, H E) -> (B, H, T, E)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm Transformer block."""

    def __init__(self, config: DecoderConfig, rotary: RotaryTable) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config, rotary)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h))
        return h + self.mlp(self.post_attention_layernorm(h))


class Trunk(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        rotary = RotaryTable(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config, rotary) for _ in range(config.n_layer))
        self.norm = make_norm(config)
        self.checkpoint_activations = False  # in training, keep none of a block's: it runs again in the backward pass

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed_tokens(tokens)
        again = self.checkpoint_activations and self.training
        for block in self.layers:
            h = checkpoint(block, h, use_reentrant=False) if again else block(h)
        return self.norm(h)


class Decoder(nn.Module):
    """Token ids (B, T) -> logits (B, T, V) of the next token."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_head:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[-1] > self.config.context:
            raise ValueError(f"{tokens.shape[-1]} tokens exceed the context of {self.config.context}")
        return self.lm_head(self.model(tokens))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> "Decoder":
        """Matrices from normal(0, 0.02), residual projections scaled by 1/sqrt(2 n_layer), gains 1, biases 0."""
        residual = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                projects_back = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, residual if projects_back else 0.02, generator=generator)
        return self


def make_norm(config: DecoderConfig) -> RMSNorm | LayerNorm:
    """The norm that the config names, gain 1 (and bias 0)."""
    kind = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[config.norm]
    return kind(config.d_model, eps=config.norm_eps)


def parameter_count(model: nn.Module) -> int:
    """Parameters, a tied head counted once."""
    return sum(p.numel() for p in model.parameters())


def lengthen(model: Decoder, context: int) -> None:
    """Let `model` take up to `context` tokens; at the positions that it had, nothing of it changes.

    Raises:
        ValueError: it takes more already.
    """
    if context < model.config.context:
        raise ValueError(f"the model takes {model.config.context} tokens, and {context} are fewer")
    device = next(model.parameters()).device
    model.config = replace(model.config, context=context)
    rotary = RotaryTable(model.config).to(device)
    for module in model.modules():
        if isinstance(module, Attention):
            module.rotary = rotary
