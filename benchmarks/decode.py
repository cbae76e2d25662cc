"""Decoding speed on a CPU: against transformers' generate, without norms, with int8 weights, and against bandwidth."""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig

from tapernorm.models.decode import generate
from tapernorm.models.decoder_config import DecoderConfig
from tapernorm.models.packed_decoder import PackedDecoder, Weights
from tapernorm.util.rng import generator
from tapernorm_lab.config.sections import BenchConfig, paper_d_ff
from tapernorm_lab.experiments.machine import read_bandwidth
from tapernorm_lab.experiments.speed.decode_speed import Stepper, bench_decode
from tapernorm_lab.experiments.speed.interleaved_timing import interleave, paired_speedup

from .models import decoder, stock_llama, tapered
from .report import Figure, figure

PROMPT, ROUNDS, WARMUP = 32, 9, 1
NEW_TOKENS = {64: 64, 512: 32}
OVER_TRANSFORMERS = {64: 1.5, 512: 1.4}
FUSED_OVER_BASELINE = {64: 1.25, 512: 1.03}
INT8_ARMS: dict[str, Weights] = {"int8_bfloat16": "int8", "float32_float32": "stored"}  # weights_activations
INT8_OVER_FLOAT32 = {(512, 1): 1.8}  # (d_model, threads)


def shape(d_model: int) -> DecoderConfig:
    """Return the shape of the paper's decoder of width `d_model`."""
    return DecoderConfig(
        vocab_size=10000,
        d_model=d_model,
        n_layer=8,
        n_head=16,
        n_kv_head=16,
        d_ff=paper_d_ff(d_model),
        context=512,
        norm="rmsnorm",
        norm_eps=1e-6,
        rope_theta=10000.0,
        tie_head=True,
    )


def measure() -> Iterator[Figure]:
    """Yield the figures of the paper's smallest and largest decoder, on one and on two threads."""
    for threads in (1, 2):
        for d_model in (64, 512):
            yield from _over_transformers(d_model, threads)
            yield from _without_norms(d_model, threads)
            yield from _int8(d_model, threads)


def _over_transformers(d_model: int, threads: int) -> Iterator[Figure]:
    torch.set_num_threads(threads)
    new_tokens = NEW_TOKENS[d_model]
    tokens = torch.randint(10000, (1, PROMPT), generator=generator(0, "bench/prompts"))
    model = decoder(shape(d_model)).requires_grad_(False)
    packed, stock = PackedDecoder(model), stock_llama(model).eval()

    def ours() -> None:
        for _ in generate(packed, tokens, new_tokens=new_tokens):
            pass

    arms: dict[str, Callable[[], None]] = {"ours": ours}
    for cache in ("dynamic", "static"):
        arms[cache] = _transformers_arm(stock, tokens, new_tokens, cache)
    samples = interleave(arms, rounds=ROUNDS, warmup=WARMUP)
    fastest = min(("dynamic", "static"), key=lambda cache: median(samples[cache]))
    name = f"decode.d{d_model}.threads{threads}"
    speedup = paired_speedup(samples, "ours", fastest)
    yield figure(f"{name}.baseline_over_transformers_{fastest}", speedup, "x", at_least=OVER_TRANSFORMERS[d_model])
    for arm in ("ours", fastest):
        yield figure(f"{name}.generate.{arm}", [new_tokens / s for s in samples[arm]], "tok/s")


def _transformers_arm(stock: Any, tokens: torch.Tensor, new_tokens: int, cache: str) -> Callable[[], None]:
    settings = GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static" if cache == "static" else None,
        disable_compile=True,  # eager against eager
    )
    mask = torch.ones_like(tokens)

    def run() -> None:
        with torch.inference_mode():
            stock.generate(tokens, attention_mask=mask, generation_config=settings)

    return run


def _int8(d_model: int, threads: int) -> Iterator[Figure]:
    """Yield the speed of int8 weights with bfloat16 activations against float32 weights and activations."""
    torch.set_num_threads(threads)
    model, new_tokens = decoder(shape(d_model)).requires_grad_(False), NEW_TOKENS[d_model]
    tokens = torch.randint(10000, (1, PROMPT), generator=generator(0, "bench/prompts"))
    steppers = {
        arm: Stepper(PackedDecoder(model, weights=weights), batch=1, capacity=PROMPT + new_tokens, mode="eager")
        for arm, weights in INT8_ARMS.items()
    }
    for stepper in steppers.values():
        stepper.load(tokens)
    arms = {arm: partial(stepper.run, 0, new_tokens) for arm, stepper in steppers.items()}
    samples = interleave(arms, rounds=ROUNDS, warmup=WARMUP)
    name, bound = f"decode.d{d_model}.threads{threads}", INT8_OVER_FLOAT32.get((d_model, threads))
    int8, float32 = INT8_ARMS
    yield figure(f"{name}.{int8}_over_{float32}", paired_speedup(samples, int8, float32), "x", at_least=bound)
    for arm, seconds in samples.items():
        yield figure(f"{name}.decode.{arm}", [new_tokens / s for s in seconds], "tok/s")


def _without_norms(d_model: int, threads: int) -> Iterator[Figure]:
    job = BenchConfig(
        dtype="float32",
        batches=(1,),
        prompts=(128,),
        new_tokens=64,
        block=16,
        rounds=16,
        warmup=2,
        threads=threads,
        modes=("eager",),
    )
    torch.set_num_threads(threads)
    cells = {
        cell["arm"]: cell
        for cell in bench_decode(tapered(shape(d_model), gate=0.0, c=1.0).eval(), job)["cells"]
        if cell["phase"] == "decode"
    }
    samples = {arm: cell["seconds"] for arm, cell in cells.items()}
    name = f"decode.d{d_model}.threads{threads}"
    for arm, cell in cells.items():
        yield figure(f"{name}.decode.{arm}", [cell["tokens"] / s for s in cell["seconds"]], "tok/s")
    fused = paired_speedup(samples, "fused", "baseline")
    yield figure(f"{name}.fused_over_baseline", fused, "x", at_least=FUSED_OVER_BASELINE[d_model])
    yield figure(f"{name}.unfused_over_baseline", paired_speedup(samples, "unfused", "baseline"), "x")
    yield figure(f"{name}.no_norm_over_baseline", paired_speedup(samples, "identity", "baseline"), "x")
    if d_model == 512:
        limit = median(read_bandwidth(torch.device("cpu")))
        best = min(samples, key=lambda arm: median(samples[arm]))
        cell = cells[best]
        moved = [cell["bytes_per_token"] * cell["tokens"] / s / limit * 100 for s in cell["seconds"]]
        yield figure(f"{name}.read_bandwidth_share.{best}", moved, "%", at_least=72 if threads == 1 else None)
