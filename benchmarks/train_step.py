"""Training-step speed: our decoder at each stage of the taper against transformers' LLaMA, one loop for all."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tapernorm.bench import interleave, paired_speedup
from tapernorm.config import DecoderConfig, TrainConfig
from tapernorm.metrics import gradient_norm
from tapernorm.rng import generator
from tapernorm.taper import Taper, taper_of
from tapernorm.train import make_optimizer, training_loss

from .models import decoder, stock_llama, tapered
from .report import Figure, figure

BATCH, THREADS, ROUNDS, WARMUP = 4, 2, 41, 3
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
SETTINGS = TrainConfig(
    batch=BATCH,
    lr=3e-4,
    warmup_fraction=0.05,
    betas=(0.9, 0.95),
    adam_eps=1e-8,
    weight_decay=0.0,
    clip_norm=1.0,
    precision="float32",
    log_every=1,
    eval_every=0,
)


class StockLlama(nn.Module):
    """transformers' LLaMA as a map from ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stock = stock_llama(decoder(SHAPE))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.stock(tokens, use_cache=False).logits


def one_step(model: nn.Module, taper: Taper | None) -> Callable[[], None]:
    """The optimizer step of the trainer, on fixed tokens."""
    optimizer = make_optimizer(model, SETTINGS)
    parameters = list(model.parameters())
    windows = torch.randint(SHAPE.vocab_size, (BATCH, SHAPE.context + 1), generator=generator(0, "bench"))

    def step() -> None:
        ce, aux, _ = training_loss(model, taper, windows)
        (ce + aux).backward()
        norm = gradient_norm(parameters)
        norm.item()
        nn.utils.clip_grads_with_norm_(parameters, SETTINGS.clip_norm, norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure() -> Iterator[Figure]:
    """Speed relative to transformers' LLaMA (Baseline) and to Baseline (0 < g < 1, g = 0)."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    arms = {
        "llama": one_step(StockLlama(), None),
        "baseline": one_step(decoder(SHAPE), None),
        "mix": one_step(mix := tapered(SHAPE, gate=0.5, anchored=True), taper_of(mix)),
        "linear": one_step(linear := tapered(SHAPE, gate=0.0, anchored=True), taper_of(linear)),
    }
    samples = interleave(arms, rounds=ROUNDS, warmup=WARMUP)
    bounds = {"baseline": ("llama", 1.0), "mix": ("baseline", 0.93), "linear": ("baseline", 1.0)}
    for arm, (reference, bound) in bounds.items():
        yield figure(f"train_step.{arm}_over_{reference}", paired_speedup(samples, arm, reference), "x", at_least=bound)
    for arm, seconds in samples.items():
        yield figure(f"train_step.{arm}.step_time", seconds, "s")
