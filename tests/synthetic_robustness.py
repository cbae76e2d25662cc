"""Made-up scores on odd inputs with the shape of real ones: All-Taper blows up on code."""

import json
from pathlib import Path
from typing import Any

LABELS = {
    "baseline": "Baseline",
    "internal_aux": "Internal-Taper (+aux)",
    "all": "All-Taper",
    "all_aux": "All-Taper (+aux)",
}
CONTEXT, BIN, LAST = 64, 16, 96
TRIALS = {  # trial -> label, rows, parts
    "held_out": ("held-out text", 200, {"all": ("all positions", 0, 64), "unrepeated": ("no repeats", 15, 56)}),
    "code": ("Python standard library", 300, {"all": ("all positions", 0, 64)}),
    "rare": ("rare token repeated", 200, {"repeats": ("the repeats", 15, 23), "after": ("text after", 23, 64)}),
    "longer": ("beyond", 90, {"to_64": ("positions 0–63", 0, 64), "to_96": ("positions 64–95", 64, 96)}),
}
WORST = "class \x00Odd:\n\t“quoted” — café " + "x = 1\n" * 20


def loss(model: str, d_model: int, seed: int, trial: str, part: str) -> float:
    """The mean loss of a made-up model."""
    level = {"code": 8.0, "rare": 10.0 if part == "repeats" else 4.2}.get(trial, 4.0) - d_model / 100 + 0.01 * seed
    odd = {"all": 2.5, "all_aux": 1.5, "internal_aux": 1.1}.get(model, 1.0) + (0.1 * seed if model != "baseline" else 0)
    return level * (odd if trial == "code" else 1.0 if model == "baseline" else 1.02 + 0.001 * seed)


def score(model: str, d_model: int, seed: int, trial: str, part: str) -> dict[str, Any]:
    mean = loss(model, d_model, seed, trial, part)
    rows = {"mean": mean, "median": mean - 0.1, "p99_9": mean + 1.0, "max": mean + 2.0 + seed, "nonfinite": 0}
    tokens = {"mean": mean, "median": 0.6 * mean, "p99_9": mean + 9.0, "max": mean + 12.0, "nonfinite": 0}
    excess = mean - loss("baseline", d_model, seed, trial, part)
    blown = 30 * seed if trial == "code" and model.startswith("all") else 0
    beside = {"excess_p99_9": 2 * excess, "excess_max": 3 * excess, "excess_row": 5}
    beside |= {"blown": blown, "baseline_blown": int(trial == "rare")}
    return {
        "model": model,
        "trial": trial,
        "part": part,
        "rows": rows,
        "tokens": tokens,
        "beside_baseline": None if model == "baseline" else beside,
        "worst": [{"row": 7 + seed, "ce": rows["max"], "text": WORST}],
    }


def document(d_model: int, seed: int, *, models: tuple[str, ...] = tuple(LABELS), **changes: Any) -> dict[str, Any]:
    cells = [(trial, part) for trial, (_, _, parts) in TRIALS.items() for part in parts]
    trials = {
        name: {
            "label": label,
            "rows": rows,
            "rows_sha256": f"{len(name):064d}",
            "origin": f"somewhere of {name}",
            "parts": {part: {"label": text, "first": a, "last": b} for part, (text, a, b) in parts.items()},
        }
        for name, (label, rows, parts) in TRIALS.items()
    }
    facts = {m: {"label": LABELS[m], "parameters": 100 * d_model, "weights_sha256": m[0] * 64} for m in models}
    provenance = {"device": "cpu", "config_hash": "c" * 16, "commit": "a" * 40, "packages": {"torch": "2.13.0"}}
    return {
        "schema_version": 1,
        "kind": "robustness",
        "job": {"d_model": d_model, "seed": seed, "context": CONTEXT, "robustness": {"position_bin": BIN}},
        "vocab_size": 1024,
        "models": facts,
        "trials": trials,
        "scores": [score(model, d_model, seed, trial, part) for model in models for trial, part in cells],
        "positions": {
            model: [loss(model, d_model, seed, "held_out", "all") + 0.1 * i for i in range(LAST // BIN)]
            for model in models
        },
        "provenance": provenance,
    } | changes


def write_run(folder: Path, *, widths: tuple[int, ...] = (32, 48), seeds: tuple[int, ...] = (1, 2, 3)) -> list[Path]:
    """One file per width and seed; the smaller width lacks All-Taper without auxiliary loss."""
    paths = []
    for d_model in widths:
        models = tuple(LABELS) if d_model == max(widths) else ("baseline", "internal_aux", "all_aux")
        for seed in seeds:
            path = folder / f"d{d_model}" / f"seed{seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document(d_model, seed, models=models)))
            paths.append(path)
    return paths
