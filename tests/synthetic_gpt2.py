"""Made-up evaluations and fine-tunes of two small GPT-2s with the shape of real ones."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

METHODS = ("vanilla", "fakeln", "internal_aux", "all_aux")
SIZES = {"tiny": 2, "mini": 4}  # layers; the smaller one comes second in the alphabet
PARAMETERS = {"tiny": 1_200_000, "mini": 4_100_000}
CORPORA = {
    "held_out": ("web, held out", "owt", 3.4),
    "stdlib": ("Python standard library", "pile", 2.9),
    "stdlib_filtered": ("Python standard library, filtered", "pile_filtered", 2.7),
}
RISE = {"original": 0.05, "vanilla": 0.0, "fakeln": 0.02, "internal_aux": 0.01, "all_aux": 0.015}
TAPER = (20, 104)
WORST = "class \x00Odd:\n\t“quoted” — café | __init__ <b>\n" + "x = 1\n" * 20


def gate(step: int) -> float:
    start, end = TAPER
    return (
        1.0 if step < start else 0.0 if step >= end else 0.5 * (1 + math.cos(math.pi * (step - start) / (end - start)))
    )


def removals(n_layer: int) -> dict[str, int]:
    """Site -> step, in the order of the stages."""
    stages = (("ln_2", 20, 2), ("ln_1.qk", 44, 2), ("ln_1.v", 68, 3))
    steps = {f"transformer.h.{i}.{site}": start + gap * i for site, start, gap in stages for i in range(n_layer)}
    return steps | {"transformer.ln_f": 104}


def statistics(mean: float, shift: float = 0.0) -> dict:
    """Statistics of a corpus whose rows spread around `mean`; `shift` moves all of them."""
    rows = {"mean": mean, "median": mean - 0.02, "trimmed_mean": mean - 0.01, "p99_9": mean + 2.5, "max": mean + 4.0}
    rows = {name: value + shift for name, value in rows.items()} | {"std": 0.5, "nonfinite": 0}
    tokens = {"mean": mean + shift, "median": 0.6 * mean + shift, "p99_9": 14.0 + shift}
    worst = [{"row": 7 + 3 * i, "ce": rows["max"] - 0.1 * i, "text": WORST} for i in range(10)]
    return {"rows": rows, "tokens": tokens, "worst": worst}


def evaluation(size: str, method: str, seed: int | None, *, fold_shift: float = 2e-7, **changes) -> dict:
    kind = "original" if method == "original" else "published" if method.startswith("published") else "finetuned"
    tapered = method in ("fakeln", "internal_aux", "all_aux")
    corpora = {}
    for name, (label, column, level) in CORPORA.items():
        mean = level * (1 + RISE[method.removeprefix("published_")]) - 0.2 * (size == "mini") + 0.01 * (seed or 0)
        corpora[name] = {
            "label": label,
            "origin": f"somewhere of {name}",
            "column": column,
            "rows": 300,
            "targets": 300 * 127,
            "bytes": 300 * 127 * 3,
            "context": 128,
            "vocab_size": 4096,
            "tokenizer_sha256": "t" * 64,
            "blocks_sha256": name.ljust(64, "b"),
            "forms": {"gated": statistics(mean)} | ({"fused": statistics(mean, fold_shift)} if tapered else {}),
        }
    model = {"kind": kind, "size": size, "method": method, "seed": seed, "base": "pre-trained here"}
    labels = {name: label for name, (label, _, _) in CORPORA.items()}
    return {
        "schema_version": 1,
        "kind": "evaluate",
        "job": {"model": model, "labels": labels, "columns": {n: c for n, (_, c, _) in CORPORA.items()}},
        "parameters": PARAMETERS[size],
        "corpora": corpora,
        "provenance": {"config_hash": "e" * 16, "commit": "a" * 40, "device": "cpu", "packages": {"torch": "2.13.0"}},
    } | changes


def finetune_result(size: str, method: str, seed: int, steps: int) -> dict:
    values = {
        "valid_ce": (3.4 * (1 + RISE[method]), "nats/token"),
        "parameters": (PARAMETERS[size], "parameters"),
        "train_tokens": (steps * 8 * 128, "tokens"),
        "train_time_s": (30.0, "s"),
        "tokens_per_s": (steps * 8 * 128 / 30, "tokens/s"),
        "peak_mem_bytes": (500_000_000, "bytes"),
    }
    constant = "sigma_bar" if method == "fakeln" else "c"
    sites = removals(SIZES[size])
    return {
        "schema_version": 1,
        "kind": "finetune",
        "job": {"method": method, "size": size, "seed": seed, "steps": steps}
        | {"lr": 6e-4, "batch": 8, "aux_weight": 0.0 if method == "vanilla" else 0.1},
        "values": {name: {"value": value, "unit": unit} for name, (value, unit) in values.items()},
        "norms": {} if method == "vanilla" else {site: {constant: 0.8} for site in sites},
        "removals": sites if method == "fakeln" else None,
        "data_hash": "d" * 16,
        "provenance": {"config_hash": "f" * 16, "commit": "a" * 40, "device": "cpu", "packages": {"torch": "2.13.0"}},
    }


def metrics(size: str, method: str, seed: int, steps: int, eval_every: int = 30) -> list[dict]:
    """Lines as the trainer logs them: every step, held-out loss now and then and at the end."""
    noise = np.random.default_rng([list(SIZES).index(size), seed])  # every method sees the same batches
    own = np.random.default_rng([METHODS.index(method), list(SIZES).index(size), seed])
    sites = removals(SIZES[size])
    lines = []
    for step in range(steps):
        removed = sum(at <= step for at in sites.values())
        g = {"vanilla": 1.0, "fakeln": 1 - removed / len(sites)}.get(method, gate(step))
        floor = 3.5 - 0.2 * (size == "mini")
        ce = floor + 0.35 * math.exp(-step / 60) + 0.06 * noise.standard_normal()
        lag = (0.03 if method == "fakeln" else 0.015) * (1 - g) + RISE[method] / 2 * (1 - g)
        bumps = [0.12 * math.exp(-(step - at) / 5) for at in sites.values() if at <= step] if method == "fakeln" else []
        ce += ce * lag * (1 + math.exp(-max(0, step - 104) / 40)) + 0.3 * sum(bumps) + 0.004 * own.standard_normal()
        line = {"step": step, "ce": ce, "aux": 0.0, "loss": ce, "gate": g, "lr": 6e-4, "grad_norm": 0.5}
        line |= {"removed": removed} if method == "fakeln" else {}
        lines.append(line | {"scale_target": None, "tokens_per_s": 9e3, "elapsed_s": 0.1 * step})
        if step % eval_every == eval_every - 1 or step == steps - 1:
            held_out = floor + 0.3 * math.exp(-step / 60)
            lines.append({"step": step, "valid_ce": held_out * (1 + lag), "elapsed_s": 0.1 * step + 1})
    return lines


def write_evaluation(folder: Path, size: str, method: str, seed: int | None, **how) -> Path:
    path = folder / "evaluate" / method / size / f"seed{seed or 0}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(evaluation(size, method, seed, **how)), encoding="utf-8")
    return path


def write_finetune(folder: Path, size: str, method: str, seed: int, steps: int = 160, **how) -> Path:
    job = folder / "finetune" / method / size / f"seed{seed}"
    job.mkdir(parents=True)
    lines = metrics(size, method, seed, steps, **how)
    (job / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (job / "result.json").write_text(json.dumps(finetune_result(size, method, seed, steps)), encoding="utf-8")
    return job / "result.json"


def write_run(
    folder: Path, sizes: Iterable[str] = SIZES, methods: Iterable[str] = METHODS, seeds: Iterable[int] = (0,), **how
) -> tuple[list[Path], list[Path]]:
    """Evaluations (the originals' too) and fine-tunes of every size, method and seed."""
    sizes, methods, seeds = list(sizes), list(methods), list(seeds)
    evaluations = [write_evaluation(folder, size, "original", None) for size in sizes]
    evaluations += [write_evaluation(folder, s, m, seed) for s in sizes for m in methods for seed in seeds]
    return evaluations, [write_finetune(folder, s, m, seed, **how) for s in sizes for m in methods for seed in seeds]
