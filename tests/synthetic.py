"""Made-up result folders with the shape of real ones: a loss that falls, logits that chase, a gate that closes."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tapernorm_lab.config.variants import Variant

VARIANTS = ("baseline", "internal", "internal_aux", "all", "all_aux")
GAP = {"baseline": 0.0, "internal": 0.009, "internal_aux": 0.011, "all": 0.018, "all_aux": 0.013}


def gate(step: int, steps: int) -> float:
    start = round(0.05 * steps)
    return 1.0 if step < start else 0.5 * (1 + math.cos(math.pi * (step - start) / (steps - start)))


def result(variant: str, d_model: int, seed: int, steps: int = 40, valid_ce: float = 3.0) -> dict:
    values = {
        "valid_ce": (valid_ce, "nats/token"),
        "bits_per_byte": (valid_ce / 2.5, "bits/byte"),
        "valid_tokens": (50_000, "tokens"),
        "parameters": (12 * 8 * d_model**2 + 4096 * d_model, "parameters"),
        "train_tokens": (steps * 1024, "tokens"),
        "train_time_s": (steps * 0.1, "s"),
        "tokens_per_s": (10_240.0, "tokens/s"),
        "peak_mem_bytes": (400_000_000, "bytes"),
    }
    model = {"d_model": d_model, "d_ff": 344, "n_layer": 8, "n_head": 4, "vocab_size": 4096, "context": 256}
    return {
        "schema_version": 1,
        "kind": "pretrain",
        "job": {
            "variant": variant,
            "seed": seed,
            "steps": steps,
            "model": {**model, "norm": "rmsnorm"},
            "train": {"batch": 4, "lr": 0.003, "precision": "float32"},
            "taper": None,
        },
        "values": {key: {"value": value, "unit": unit} for key, (value, unit) in values.items()},
        "norms": {},
        "scale_target": 1.25 if Variant.named(variant).anchored else None,
        "radial": {"share": 0.14 if Variant.named(variant).final else 2e-7, "tokens": 512},
        "provenance": {
            "config_hash": "0123456789012345",
            "commit": "a" * 40,
            "device": "cpu",
            "seed": seed,
            "packages": {"torch": "2.13.0"},
        },
    }


def fold_result(variant: str, d_model: int, seed: int, moved: dict[str, float] | None = None) -> dict:
    """What `tapernorm fold` writes: the loss of 3.0 and how far each form `moved` it."""
    shifts = {"gated": 0.0, "unfused": 0.0, "fused": 0.0, **(moved or {})}
    reports = {form: {"fused": form == "fused", "largest_logit_difference": 1e-5} for form in ("unfused", "fused")}
    trained = result(variant, d_model, seed)
    values = {f"valid_ce_{form}": {"value": 3.0 + shift, "unit": "nats/token"} for form, shift in shifts.items()}
    same = {key: trained[key] for key in ("schema_version", "job", "provenance")}
    return {**same, "kind": "fold", "values": values, "reports": reports}


def write_fold(folder: Path, variant: str, d_model: int, seed: int, moved: dict[str, float] | None = None) -> Path:
    """The fold of one job under `folder`; returns its result.json."""
    job = folder / "fold" / variant / f"d{d_model}" / f"seed{seed}"
    job.mkdir(parents=True)
    (job / "result.json").write_text(json.dumps(fold_result(variant, d_model, seed, moved)), encoding="utf-8")
    return job / "result.json"


def metrics(variant: str, d_model: int, seed: int, steps: int = 40, log_every: int = 1) -> list[dict]:
    """Lines as the trainer logs them, with one evaluation half way and one at the end."""
    rng = np.random.default_rng([VARIANTS.index(variant), d_model, seed])
    batch = np.random.default_rng([d_model, seed])  # every variant sees the same batches
    level = 1 + 0.004 * rng.standard_normal()
    floor = 2.2 + 3.2 * (64 / d_model) ** 0.35
    lines = []
    for step in range(0, steps, log_every):
        g = 1.0 if variant == "baseline" else gate(step, steps)
        progress = step / steps
        ce = floor + (8.3 - floor) * math.exp(-9 * progress**0.7)
        ce *= 1 + GAP[variant] * (1 - g) + 0.02 * batch.standard_normal() + 0.004 * (g < 1) * rng.standard_normal()
        growth = {"all": 4.0, "internal": 0.3, "baseline": 0.3}.get(variant, 0.15)
        rms = (0.6 + 1.6 * (1 - math.exp(-8 * progress))) * (1 + growth * (1 - g if variant == "all" else progress))
        rms *= level * (1 + 0.02 * rng.standard_normal())
        norm = (0.35 + 1.8 * math.exp(-25 * progress)) * (1 + (1.5 if variant == "all" else 0.4) * (1 - g))
        norm *= level * math.exp(0.25 * rng.standard_normal())
        line = {"step": step, "ce": ce, "aux": 0.0, "loss": ce, "gate": g, "lr": 0.003 * (1 - progress)}
        line |= {"grad_norm": norm, "grad_norm_mlp": norm / 2, "logit_rms": rms, "logit_max": 9 * rms}
        line |= {"scale_target": None, "tokens_per_s": 10_240.0, "elapsed_s": 0.1 * step}
        lines.append(line)
        if step in (steps // 2, steps - 1):
            lines.append({"step": step, "valid_ce": ce, "bits_per_byte": ce / 2.5, "elapsed_s": 0.1 * step + 1})
    return lines


def write_job(folder: Path, variant: str, d_model: int, seed: int, steps: int = 40, log_every: int = 1) -> Path:
    """One job folder under `folder`, like results/{run}; returns its result.json."""
    job = folder / "pretrain" / variant / f"d{d_model}" / f"seed{seed}"
    job.mkdir(parents=True)
    lines = metrics(variant, d_model, seed, steps, log_every)
    (job / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    final = np.mean([line["ce"] for line in lines[-8:] if "ce" in line])
    (job / "result.json").write_text(json.dumps(result(variant, d_model, seed, steps, float(final))), encoding="utf-8")
    return job / "result.json"


def write_run(folder: Path, variants: Iterable[str], widths: Iterable[int], seeds: Iterable[int], **how) -> list[Path]:
    """Every (variant, width, seed) of a run; returns the result files."""
    widths, seeds = list(widths), list(seeds)
    return [write_job(folder, v, d, s, **how) for v in variants for d in widths for s in seeds]
