"""Text from a model: prefill the prompt, then decode one token at a time on a static key-value cache.

B batch, T prompt length, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..util.compiler import require_compiler
from ..util.errors import UserError
from .kv_cache import KVCache
from .packed_decoder import PackedDecoder, Position


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: greedy at temperature 0, else from the tempered, truncated distribution.

    Raises:
        ValueError: a temperature below 0 or not finite, top_k < 1, or top_p outside (0, 1].
    """

    temperature: float = 0.0
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = None  # then the smallest set of them that holds this much probability

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")

    def __call__(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Next tokens (B,) from logits (B, V)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        order = logits.float().sort(dim=-1, descending=True)
        values = (order.values - order.values[:, :1]) / self.temperature  # at most 0: no temperature overflows
        if self.top_k is not None:
            values[:, self.top_k :] = -torch.inf
        probabilities = values.softmax(-1)
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities  # mass of the likelier tokens
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        if generator is not None:
            probabilities = probabilities.to(generator.device)  # draws are the same whatever the model runs on
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        return order.indices.gather(-1, drawn.to(logits.device))[:, 0]


def pad_left(prompts: Sequence[Sequence[int]], *, pad: int) -> tuple[Tensor, Tensor]:
    """(tokens (B, T), pads (B,)): prompts of different lengths, aligned at their ends.

    Raises:
        UserError: no prompt, or an empty one.
    """
    if not prompts or not all(prompts):
        raise UserError("each prompt needs at least one token")
    length = max(map(len, prompts))
    rows = [[pad] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows), torch.tensor([length - len(prompt) for prompt in prompts])


@torch.inference_mode()
def prefill(model: PackedDecoder, tokens: Tensor, cache: KVCache) -> Tensor:
    """Fill the cache with the prompts (B, T); logits (B, V) of the first new token."""
    return model(tokens, cache, 0)


@torch.inference_mode()
def decode_step(model: PackedDecoder, tokens: Tensor, cache: KVCache, position: Position) -> Tensor:
    """Feed one token per row (B,) that stands at `position`; logits (B, V) of the next."""
    return model(tokens[:, None], cache, position)


def compiled_step(model: PackedDecoder, cache: KVCache) -> Callable[[Tensor, Tensor], Tensor]:
    """`decode_step` of (tokens (B,), position ()) as one compiled graph for all positions; on a GPU, CUDA graphs.

    The logits that it returns are overwritten by the next call.

    Raises:
        UserError: torch.compile has no C++ compiler on this CPU.
    """
    device = model.embed.weight.device
    require_compiler(device)

    def step(tokens: Tensor, position: Tensor) -> Tensor:
        return model(tokens[:, None], cache, position)

    compiled = torch.compile(step, dynamic=False, mode="reduce-overhead" if device.type == "cuda" else None)
    return torch.inference_mode()(compiled)


def generate(
    model: PackedDecoder,
    tokens: Tensor,
    *,
    new_tokens: int,
    pads: Tensor | None = None,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    eod: int | None = None,
    compile: bool = False,
) -> Iterator[Tensor]:
    """Up to `new_tokens` next tokens (B,), one step at a time; ends once every row has ended its document.

    Args:
        tokens: prompts (B, T). `pad_left` makes them, and `pads` (B,), of prompts of several lengths.
        sampling: greedy unless given.
        generator: of the draws; needed to sample.
        eod: end-of-document id; a row that drew it repeats it.
        compile: decode through `compiled_step`: slow to start, then faster.

    Raises:
        UserError: prompt and new tokens exceed the model's context, sampling without a generator, or no compiler.
    """
    sampling = sampling or Sampling()
    if sampling.temperature > 0 and generator is None:
        raise UserError(
            "sampling needs a generator: pass tapernorm.util.rng.generator(seed, 'generate'), or temperature 0"
        )
    cache = KVCache.allocate(
        model.config,
        batch=tokens.shape[0],
        capacity=tokens.shape[1] + new_tokens,
        dtype=model.embed.weight.dtype,
        device=tokens.device,
        pads=pads,
    )

    fast = compiled_step(model, cache) if compile else None

    def steps() -> Iterator[Tensor]:
        logits = prefill(model, tokens, cache)
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for position in range(tokens.shape[1], cache.capacity):
            drawn = sampling(logits, generator)
            if eod is not None:
                drawn = drawn.masked_fill(ended, eod)
                ended = drawn == eod
            yield drawn
            if position == cache.capacity - 1 or (eod is not None and bool(ended.all())):
                return
            if fast is None:
                logits = decode_step(model, drawn, cache, position)
            else:
                logits = fast(drawn, torch.tensor(position, device=drawn.device))

    return steps()
