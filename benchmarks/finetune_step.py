"""Speed of a fine-tuning step of a small GPT-2: vanilla, at each stage of the taper, and a FakeLN without norms."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tapernorm import attach
from tapernorm.taper import Taper
from tapernorm.util.rng import generator
from tapernorm_lab.config.fakeln_schedule import FakeSchedule
from tapernorm_lab.config.gpt2 import Gpt2Shape
from tapernorm_lab.models.fakeln import FakeLN, attach_fakeln
from tapernorm_lab.models.gpt2 import GPT2LMHeadModel, fresh
from tapernorm_lab.training.training_loss import next_tokens

from .report import Figure
from .steps import compare, one_step

BATCH, CONTEXT, VOCABULARY, THREADS = 4, 256, 4096, 2
SHAPE = Gpt2Shape(d_model=384, n_layer=6, n_head=6, dropout=0.1, norm_eps=1e-5)
REMOVED = 1000  # a step after every removal


def measure() -> Iterator[Figure]:
    """Yield the speeds of the taper (0 < g < 1, g = 0) over vanilla, and of FakeLN over the taper at g = 0."""
    torch.manual_seed(0)
    rows = tokens()
    batch = next_tokens(rows)
    fake, faked = removed(rows)
    arms = {
        "vanilla": one_step(gpt2(), None, *batch),
        "mix": one_step(*tapered(rows, 0.5), *batch),
        "linear": one_step(*tapered(rows, 0.0), *batch),
        "fakeln": one_step(fake, faked, *batch),
    }
    bounds = {"mix": ("vanilla", 0.90), "linear": ("vanilla", 0.97), "fakeln": ("linear", 0.95)}
    yield from compare("finetune_step", arms, bounds, threads=THREADS)


def tokens() -> Tensor:
    """Random tokens (B, T)."""
    return torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=generator(0, "bench"))


def gpt2() -> GPT2LMHeadModel:
    """Return a GPT-2 with random weights, in training mode. Its speed does not depend on the weights."""
    return fresh(SHAPE, vocab_size=VOCABULARY, context=CONTEXT, generator=generator(0, "init")).train()


def tapered(rows: Tensor, gate: float) -> tuple[GPT2LMHeadModel, Taper]:
    """Return an Internal-TaperLN (+aux) model at g = `gate` and its taper, calibrated on token ids `rows` (B, T)."""
    model = gpt2()
    taper = attach(model, anchor_weight=0.1)
    with taper.observe(), torch.no_grad():
        model(rows, use_cache=False)
        taper.anchor_loss()
    taper.calibrate()
    taper.set_gate(gate)
    return model, taper


def removed(rows: Tensor) -> tuple[GPT2LMHeadModel, FakeLN]:
    """Return a FakeLN model without any norm and its driver, with sigma_bar from token ids `rows` (B, T)."""
    model = gpt2()
    schedule = FakeSchedule(mlp_start=1, mlp_gap=1, qk_start=10, qk_gap=1, v_start=20, v_gap=1, final=30)
    driver = attach_fakeln(model, schedule=schedule, aux_weight=0.1, eot=0)
    with driver.observe(), torch.no_grad():
        model(rows, use_cache=False)
        driver.auxiliary_loss(rows)
    driver.set_step(REMOVED)
    return model, driver
