"""The paper's pre-norm decoder for TinyStories, with the parameter names of Hugging Face's LLaMA.

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
    """Rotary position embedding: at position t, channels i and i + E/2 of a head rotate by t * theta^(-2i/E).

    cos (context, E) repeats for both halves of a head. sin (context, E) is negated in the first half.
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
        """Rotate x (B, H, T, E) by positions 0 ... T-1."""
        cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))
        left, right = x.chunk(2, dim=-1)
        return torch.addcmul(x * cos, torch.cat((right, left), dim=-1), sin)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary position embedding, without biases."""

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
        """Apply causal attention to x (B, T, D)."""
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
        """Apply the network to x (B, T, D)."""
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
        """Add attention and MLP to the residual stream h (B, T, D)."""
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
        self.checkpoint_activations = False  # whether the backward pass of training recomputes the blocks' activations

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the normed residual stream (B, T, D) of token ids (B, T)."""
        h = self.embed_tokens(tokens)
        again = self.checkpoint_activations and self.training
        for block in self.layers:
            h = checkpoint(block, h, use_reentrant=False) if again else block(h)
        return self.norm(h)


class Decoder(nn.Module):
    """Pre-norm language model with rotary attention and SwiGLU: token ids (B, T) -> logits (B, T, V) of the next token.

    Args:
        config: its shape.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_head:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of token ids (B, T).

        Raises:
            ValueError: T exceeds the context.
        """
        if tokens.shape[-1] > self.config.context:
            raise ValueError(f"{tokens.shape[-1]} tokens exceed the context of {self.config.context}")
        return self.lm_head(self.model(tokens))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> "Decoder":
        """Draw the matrices from normal(0, 0.02), in place, and return the model.

        Residual projections (o_proj, down_proj) are scaled by 1/sqrt(2 n_layer). Gains stay 1, and biases 0.
        """
        residual = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                projects_back = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, residual if projects_back else 0.02, generator=generator)
        return self


def make_norm(config: DecoderConfig) -> RMSNorm | LayerNorm:
    """Return the norm that the config names, with gain 1 (and bias 0)."""
    kind = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[config.norm]
    return kind(config.d_model, eps=config.norm_eps)


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters. A tied head counts once."""
    return sum(p.numel() for p in model.parameters())


def lengthen(model: Decoder, context: int) -> None:
    """Raise the context of `model` to `context` tokens, in place. Earlier positions compute what they did.

    Raises:
        ValueError: `context` is below the model's own.
    """
    if context < model.config.context:
        raise ValueError(f"context must be at least the model's own, {model.config.context}, got {context}")
    device = next(model.parameters()).device
    model.config = replace(model.config, context=context)
    rotary = RotaryTable(model.config).to(device)
    for module in model.modules():
        if isinstance(module, Attention):
            module.rotary = rotary
