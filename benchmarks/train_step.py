"""Speed of a training step: a `Decoder` at each stage of the taper against transformers' LLaMA, in one loop."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tapernorm.models.decoder_config import DecoderConfig
from tapernorm.taper import taper_of
from tapernorm.util.rng import generator

from .models import decoder, stock_llama, tapered
from .report import Figure
from .steps import compare, one_step

BATCH, THREADS = 4, 2
SHAPE = DecoderConfig(
    vocab_size=4096,
    d_model=256,
    n_layer=8,
    n_head=8,
    n_kv_head=8,
    d_ff=680,
    context=256,
    norm="rmsnorm",
    norm_eps=1e-6,
    rope_theta=10000.0,
    tie_head=True,
)


def measure() -> Iterator[Figure]:
    """Yield the speeds of Baseline over transformers' LLaMA, and of the taper (0 < g < 1, g = 0) over Baseline."""
    torch.manual_seed(0)
    batch = windows()
    arms = {
        "llama": one_step(stock_llama(decoder(SHAPE)), None, *batch),
        "baseline": one_step(decoder(SHAPE), None, *batch),
        "mix": one_step(mix := tapered(SHAPE, gate=0.5, anchored=True), taper_of(mix), *batch),
        "linear": one_step(linear := tapered(SHAPE, gate=0.0, anchored=True), taper_of(linear), *batch),
    }
    bounds = {"baseline": ("llama", 1.0), "mix": ("baseline", 0.97), "linear": ("baseline", 1.02)}
    yield from compare("train_step", arms, bounds, threads=THREADS)


def windows() -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, T) of random tokens."""
    both = torch.randint(SHAPE.vocab_size, (BATCH, SHAPE.context + 1), generator=generator(0, "bench"))
    return both[:, :-1], both[:, 1:]
