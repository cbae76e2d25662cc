"""Text generation: prefill the prompt, then decode one token at a time on a static key-value cache.

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
    """The rule that draws the next token: greedy at temperature 0, else from the tempered, truncated distribution.

    Attributes:
        temperature: divisor of the logits.
        top_k: how many of the likeliest tokens to keep. None keeps all.
        top_p: probability of the smallest set of likeliest tokens to keep, after `top_k`. None keeps all.

    Raises:
        ValueError: the temperature is below 0 or not finite, top_k < 1, or top_p lies outside (0, 1].
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")

    def __call__(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw the next tokens (B,) from logits (B, V)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        order = logits.float().sort(dim=-1, descending=True)
        values = (order.values - order.values[:, :1]) / self.temperature  # at most 0: no temperature overflows
        if self.top_k is not None:
            values[:, self.top_k :] = -torch.inf
        probabilities = values.softmax(-1)
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities  # total probability of the likelier tokens
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        if generator is not None:
            probabilities = probabilities.to(generator.device)  # the draws do not depend on the model's device
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        return order.indices.gather(-1, drawn.to(logits.device))[:, 0]


def pad_left(prompts: Sequence[Sequence[int]], *, pad: int) -> tuple[Tensor, Tensor]:
    """Pad prompts of different lengths on the left with token `pad`, and return (tokens (B, T), pads (B,)).

    `pads` is the number of pad tokens in each row.

    Raises:
        UserError: there is no prompt, or one is empty.
    """
    if not prompts or not all(prompts):
        raise UserError("each prompt needs at least one token")
    length = max(map(len, prompts))
    rows = [[pad] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows), torch.tensor([length - len(prompt) for prompt in prompts])


@torch.inference_mode()
def prefill(model: PackedDecoder, tokens: Tensor, cache: KVCache) -> Tensor:
    """Fill the cache with the prompts (B, T), and return the logits (B, V) of the first new token."""
    return model(tokens, cache, 0)


@torch.inference_mode()
def decode_step(model: PackedDecoder, tokens: Tensor, cache: KVCache, position: Position) -> Tensor:
    """Feed one token per row (B,) at `position`, and return the logits (B, V) of the next token."""
    return model(tokens[:, None], cache, position)


def compiled_step(model: PackedDecoder, cache: KVCache) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `decode_step` as a function of (tokens (B,), position ()), compiled to one graph for all positions.

    On a GPU it uses CUDA graphs, and each call overwrites the logits that the previous one returned.

    Raises:
        UserError: torch.compile needs a C++ compiler on a CPU, and there is none.
    """
    device = model.embed.weight.device
    require_compiler(device)

    def step(tokens: Tensor, position: Tensor) -> Tensor:
        return model(tokens[:, None], cache, position)

    # Each leaves Python out between two kernels, where a small model spends a sixth of its time.
    if device.type == "cuda":
        compiled = torch.compile(step, dynamic=False, mode="reduce-overhead")
    else:
        compiled = torch.compile(step, dynamic=False, options={"cpp_wrapper": True})
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
    """Return an iterator over the next tokens (B,), which ends when every row has ended its document.

    Args:
        model: the packed decoder.
        tokens: prompts (B, T). `pad_left` makes them from prompts of different lengths.
        new_tokens: largest number of steps.
        pads: number of pad tokens in each row (B,), from `pad_left`, or None.
        sampling: the rule that draws a token. None is greedy.
        generator: random generator of the draws. Sampling needs it.
        eod: end-of-document id, or None. A row that drew it repeats it.
        compile: whether to decode with `compiled_step`, which starts slowly and then decodes faster.

    Raises:
        UserError: the tokens exceed the model's context, sampling lacks a generator, or `compile` lacks a compiler.
    """
    sampling = sampling or Sampling()
    if sampling.temperature > 0 and generator is None:
        raise UserError(
            "sampling needs a generator: pass generator=tapernorm.util.rng.generator(seed, 'generate'), or set "
            "temperature to 0"
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
