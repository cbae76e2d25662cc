"""Decoding speed with and without norms (method.md section 11): the measurement behind Tables 2, 2x and 2v1.

The arms are timed in turn (`interleaved_timing`), so that each sample of an arm is paired with those of the other arms
in its round. Prefill and decode are timed separately. Before any timing, the folded arms must give the logits of the
gated model.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tapernorm.models.decode import decode_step, prefill
from tapernorm.models.decoder import Decoder, lengthen
from tapernorm.models.kv_cache import KVCache
from tapernorm.models.packed_decoder import PackedDecoder
from tapernorm.util.compiler import has_compiler
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest
from tapernorm.util.provenance import provenance
from tapernorm.util.rng import generator

from ...config.jobs import BenchJob
from ...config.sections import BenchConfig
from ...training.device import take_threads
from ..machine import machine_facts, read_bandwidth, synchronize
from .decode_speed_models import make_arms
from .interleaved_timing import interleave

SCHEMA_VERSION = 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TOLERANCE = 1e-3  # of the logits' RMS: far above float32 rounding, far below a wrong fold
_MORE_ROUNDING = 4  # allowed multiple of the error that the arm's arithmetic causes in the gated model itself


class Stepper:
    """Greedy decoding of one arm in one mode, a block of steps at a time, synchronised at the end.

    One cache serves prompts of every length, and so does the graph of a mode that has one.
    """

    def __init__(self, model: PackedDecoder, *, batch: int, capacity: int, mode: str) -> None:
        self.model, self.mode, self.device = model, mode, model.embed.weight.device
        self.cache = empty_cache(model, batch, capacity)
        self.token = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.position = torch.zeros((), dtype=torch.int64, device=self.device)
        self.prompt = 0  # tokens
        self._step = torch.compile(self._fixed_step, dynamic=False) if mode == "compile" else self._fixed_step
        self._graph = self._capture() if mode == "cudagraph" else None

    @torch.inference_mode()
    def load(self, tokens: Tensor) -> None:
        """Prefill the prompts (B, T)."""
        self.prompt = tokens.shape[1]
        self.token.copy_(prefill(self.model, tokens, self.cache).argmax(-1))

    @torch.inference_mode()
    def run(self, first: int, steps: int) -> None:
        """Decode `steps` tokens from `first` tokens past the prompt on."""
        start = self.prompt + first
        if self.mode == "eager":
            for position in range(start, start + steps):
                self.token = decode_step(self.model, self.token, self.cache, position).argmax(-1)
        else:
            self.position.fill_(start)
            for _ in range(steps):
                if self._graph is not None:
                    self._graph.replay()
                else:
                    self.token.copy_(self._step(self.token, self.position))
                self.position += 1
        synchronize(self.device)

    def _fixed_step(self, token: Tensor, position: Tensor) -> Tensor:
        return self.model(token[:, None], self.cache, position).argmax(-1)

    @torch.inference_mode()
    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up outside the capture, as CUDA graphs ask for
            for _ in range(3):
                self._fixed_step(self.token, self.position)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.token.copy_(self._fixed_step(self.token, self.position))
        return graph


def empty_cache(model: PackedDecoder, batch: int, capacity: int) -> KVCache:
    weight = model.embed.weight
    return KVCache.allocate(model.config, batch=batch, capacity=capacity, dtype=weight.dtype, device=weight.device)


def run_benchmark(kind: str, gated: Decoder, job: BenchJob, *, variant: str, device: torch.device) -> dict[str, Any]:
    """Return the content of the result file of `kind` for one tapered model.

    Args:
        kind: "decode" and "last_token" time the arms of the paper's tables; "rivals" decodes DyT and Derf beside them.

    Raises:
        UserError: the model is no tapered RMSNorm model, or a folded arm computes something else.
    """
    take_threads(job.bench.threads, "bench.threads")
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length of the cache, inside the timing
        if job.bench.dtype == "float32":
            torch.set_float32_matmul_precision("high")  # TF32, as in the paper's software stack
    before = machine_facts(device)
    with_replacements = partial(bench_decode, replacements=True)
    measure = {"decode": bench_decode, "rivals": with_replacements, "last_token": bench_last_token}[kind]
    measured = measure(gated.to(device).eval(), job.bench)
    bandwidth, facts = read_bandwidth(device), machine_facts(device)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": f"bench_{kind}",
        "job": {"run": job.run, "variant": variant, **asdict(gated.config), **job.bench.model_dump(mode="json")},
        **measured,
        "read_bandwidth": {"bytes_per_s": bandwidth},
        "machine": {**facts, "load_before": before["load"], "load_after": facts["load"]},
        "provenance": provenance(config_hash=digest(job.model_dump(mode="json")), device=facts["device"]),
    }


def bench_decode(gated: Decoder, job: BenchConfig, *, replacements: bool = False) -> dict[str, Any]:
    """Check and time prefill and KV-cached decoding of every arm; return cells of raw samples, and the checks.

    Args:
        replacements: DyT and Derf are timed as well.

    Raises:
        UserError: a folded arm does not give the gated model's logits.
    """
    capacity = max(job.prompts) + job.new_tokens
    arms = make_arms(with_context(gated, capacity), DTYPES[job.dtype], replacements=replacements)
    checks = check_arms(gated, arms, job)
    modes, unavailable = available_modes(job.modes, gated.lm_head.weight.device)
    cells: list[dict[str, Any]] = []
    for batch in job.batches:
        prompts = [random_tokens(gated, batch, length) for length in job.prompts]
        for tokens in prompts:
            cells += _prompt_cells("prefill", arms, tokens, job)
        for mode in modes:
            torch._dynamo.reset()  # one mode's graphs do not count against the next one's limit
            steppers = {arm: Stepper(model, batch=batch, capacity=capacity, mode=mode) for arm, model in arms.items()}
            for tokens in prompts:
                cells += _decode_cells(steppers, tokens, mode, job)
    return {"cells": cells, "unavailable": unavailable, "checks": checks}


def bench_last_token(gated: Decoder, job: BenchConfig) -> dict[str, Any]:
    """Time the measurement of the paper's first version: a forward pass of T tokens without cache, last logits only."""
    arms = make_arms(with_context(gated, max(job.prompts)), DTYPES[job.dtype])
    checks = check_arms(gated, arms, job)
    prompts = [random_tokens(gated, batch, length) for batch in job.batches for length in job.prompts]
    cells = [cell for tokens in prompts for cell in _prompt_cells("forward", arms, tokens, job)]
    return {"cells": cells, "unavailable": [], "checks": checks}


def with_context(model: Decoder, context: int) -> Decoder:
    """Return the same weights with rotary tables for at least `context` tokens, beyond the training context."""
    if context <= model.config.context:
        return model
    longer = copy.deepcopy(model)
    lengthen(longer, context)
    return longer


def random_tokens(model: Decoder, batch: int, length: int) -> Tensor:
    """Return prompts (B, T) of random ids, which do not affect speed."""
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=generator(0, "bench/prompts"))
    return ids.to(model.lm_head.weight.device)


@torch.inference_mode()
def check_arms(gated: Decoder, arms: Mapping[str, PackedDecoder], job: BenchConfig) -> dict[str, Any]:
    """Return the largest logit difference of each folded arm to the gated model at g = 0, on random prompts.

    The gated model computes in float32; the arms' dtype and TF32 may move theirs as far as they move its own.

    Raises:
        UserError: an arm is further off than such rounding.
    """
    tokens = random_tokens(gated, 16, min(gated.config.context, 32))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    expected = gated(tokens)[:, -1]
    torch.set_float32_matmul_precision(precision)
    scale = _rms(expected)
    rounded = copy.deepcopy(gated).to(DTYPES[job.dtype])(tokens)[:, -1].float()
    allowed = _TOLERANCE * scale + _MORE_ROUNDING * _rms(rounded - expected)
    checks = {}
    for arm in ("unfused", "fused"):
        difference = arms[arm](tokens).float() - expected
        if not _rms(difference) <= allowed:
            raise UserError(
                f"the {arm} arm differs from the gated model by {_rms(difference):g} where rounding explains "
                f"{allowed:g} (RMS over logits, which are {scale:g}): its folding is wrong"
            )
        checks[arm] = {"largest_logit_difference": difference.abs().max().item(), "logit_scale": scale}
    return checks


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def available_modes(modes: Sequence[str], device: torch.device) -> tuple[list[str], list[dict[str, str]]]:
    """Return the modes that this machine can run, and the reasons for those that it cannot."""
    reasons: dict[str, str | None] = {}
    if device.type != "cuda":
        reasons["cudagraph"] = "CUDA graphs need a GPU"
    if "compile" in modes:
        reasons["compile"] = _compile_failure(device)
    usable = [mode for mode in modes if not reasons.get(mode)]
    return usable, [{"mode": mode, "reason": reason} for mode in modes if (reason := reasons.get(mode))]


def _compile_failure(device: torch.device) -> str | None:
    """Return why torch.compile fails on this machine, tested with one addition, or None if it works."""
    if not has_compiler(device):
        return "torch.compile needs a C++ compiler on a CPU, and none is installed"
    try:
        torch.compile(torch.add)(torch.ones(1, device=device), 1)
    except RuntimeError as error:  # what dynamo and inductor raise
        return f"torch.compile fails here: {str(error).strip().splitlines()[0]}"
    return None


def _decode_cells(
    steppers: Mapping[str, Stepper], tokens: Tensor, mode: str, job: BenchConfig
) -> Iterator[dict[str, Any]]:
    """Return the timed arms: blocks of decoding steps after the prompts (B, T)."""

    def block_of(stepper: Stepper) -> Callable[[], None]:
        stepper.load(tokens)
        starts = itertools.cycle(range(0, job.new_tokens - job.block + 1, job.block))
        return lambda: stepper.run(next(starts), job.block)

    batch, prompt = tokens.shape
    blocks = {arm: block_of(stepper) for arm, stepper in steppers.items()}
    for cell in _cells(blocks, job, mode=mode, batch=batch, prompt=prompt, phase="decode"):
        stepper = steppers[cell["arm"]]
        filled = prompt + job.new_tokens / 2 if mode == "eager" else stepper.cache.capacity
        read = step_bytes(stepper.model, stepper.cache, filled)
        yield cell | {"tokens": batch * job.block, "bytes_per_token": read / batch}


def _prompt_cells(
    phase: str, arms: Mapping[str, PackedDecoder], tokens: Tensor, job: BenchConfig
) -> Iterator[dict[str, Any]]:
    """Return the timed arms: forward passes of the prompts (B, T); a prefill writes a cache."""

    def forward(model: PackedDecoder) -> Callable[[], None]:
        cache = empty_cache(model, *tokens.shape) if phase == "prefill" else None

        @torch.inference_mode()
        def once() -> None:
            model(tokens, cache)
            synchronize(tokens.device)

        return once

    batch, prompt = tokens.shape
    passes = {arm: forward(model) for arm, model in arms.items()}
    for cell in _cells(passes, job, mode="eager", batch=batch, prompt=prompt, phase=phase):
        yield cell | {"tokens": tokens.numel(), "bytes_per_token": None}


def _cells(arms: Mapping[str, Callable[[], None]], job: BenchConfig, **where: Any) -> list[dict[str, Any]]:
    """Return one cell per arm, with its seconds per round."""
    samples = interleave(arms, rounds=job.rounds, warmup=job.warmup)
    return [{**where, "arm": arm, "seconds": seconds} for arm, seconds in samples.items()]


def step_bytes(model: PackedDecoder, cache: KVCache, filled: float) -> float:
    """Return the bytes that one decode step must read: every weight of a product, and the filled part of the cache."""
    looked_up = model.embed.weight  # a row of it; a tied head is a parameter of its own here, and read whole
    weights = sum(p.nbytes for p in model.parameters() if p is not looked_up)
    return weights + cache.nbytes * filled / cache.capacity
