"""Made-up benchmark files with the shape of real ones: noisy rounds around known speeds."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

ARMS = ("baseline_naive", "baseline", "unfused", "fused", "identity")
SPEED = {  # relative to the several-op norm
    "eager": {"baseline_naive": 1.0, "baseline": 1.075, "unfused": 1.115, "fused": 1.16, "identity": 1.2},
    "compile": {"baseline_naive": 1.0, "baseline": 0.99, "unfused": 1.01, "fused": 1.02, "identity": 1.035},
    "cudagraph": {"baseline_naive": 1.0, "baseline": 1.04, "unfused": 1.045, "fused": 1.05, "identity": 1.06},
}
TOKENS_PER_S = {"eager": 210.0, "compile": 460.0, "cudagraph": 900.0}
BYTES = 2 * 30_000_000.0


def cells(
    phase: str, modes: Sequence[str], batches: Sequence[int], prompts: Sequence[int], rounds: int, tokens: int
) -> list[dict]:
    """Samples in which every round is fast or slow for all arms alike, and arms differ by SPEED and a little noise."""
    rng = np.random.default_rng(3)
    made = []
    for mode in modes:
        for batch in batches:
            for prompt in prompts:
                common = np.exp(0.05 * rng.standard_normal(rounds))
                for arm in ARMS:
                    gain = 1 + (SPEED[mode][arm] - 1) * (1 - 0.15 * np.log2(prompt / 128)) * (0.8 if batch > 1 else 1)
                    speed = batch * TOKENS_PER_S[mode] * gain * (1 - 0.03 * np.log2(prompt / 128))
                    speed *= 1 if phase == "decode" else 0.25 * prompt
                    noise = np.exp(0.012 * rng.standard_normal(rounds))
                    sample = batch * (tokens if phase == "decode" else prompt)
                    made.append(
                        {"mode": mode, "batch": batch, "prompt": prompt, "phase": phase, "arm": arm}
                        | {"seconds": (sample / speed * common * noise).tolist(), "tokens": sample}
                        | {"bytes_per_token": BYTES / batch + 4096.0 * prompt if phase == "decode" else None}
                    )
    return made


def document(kind: str, made: Sequence[Mapping], **changes) -> dict:
    job = {"run": "demo", "d_model": 512, "n_layer": 8, "n_head": 16, "vocab_size": 10_000, "variant": "internal_aux"}
    return {
        "schema_version": 1,
        "kind": kind,
        "job": {**job, "dtype": "float32", "new_tokens": 256, "rounds": 20, "block": 32, "warmup": 3},
        "cells": list(made),
        "unavailable": [{"mode": "cudagraph", "reason": "no GPU"}],
        "checks": {
            "unfused": {"largest_logit_difference": 1.5e-6, "logit_scale": 5.1},
            "fused": {"largest_logit_difference": 2.5e-6, "logit_scale": 5.1},
        },
        "read_bandwidth": {"bytes_per_s": [19e9, 20e9, 20.5e9]},
        "machine": {
            "device": "cpu",
            "threads": 1,
            "tf32": None,
            "clocks": None,
            "load_before": 0.25,
            "load_after": 1.1,
        },
        "provenance": {"commit": "a" * 40, "python": "3.11.9", "packages": {"torch": "2.13.0"}, "device": "cpu"},
    } | changes


def decode(
    modes: Sequence[str] = ("eager", "compile"),
    batches: Sequence[int] = (1, 4),
    prompts: Sequence[int] = (128, 256, 512),
    rounds: int = 20,
    **changes,
) -> dict:
    """A bench_decode file: decoding in every mode, prefill in eager mode."""
    made = cells("decode", modes, batches, prompts, rounds, tokens=32)
    return document("bench_decode", made + cells("prefill", modes[:1], batches, prompts, rounds, tokens=0), **changes)


def last_token(
    batches: Sequence[int] = (1, 4), prompts: Sequence[int] = (128, 256), rounds: int = 20, **changes
) -> dict:
    made = cells("forward", ("eager",), batches, prompts, rounds, tokens=0)
    changes = {"unavailable": [], "read_bandwidth": None} | changes
    return document("bench_last_token", made, **changes)


def write(document: Mapping, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path
