"""A made spread.json: scales at every norm of a small model."""

from hashlib import sha256

import numpy as np

NORMS = [f"model.layers.{block}.{name}" for block in range(3) for name in ("a", "b")] + ["model.norm"]


WEIGHTS = b"of a model"


KEPT = ("model.layers.1.a", "model.norm")


def entry(seed, *, lost=0, growth=1.0):
    draw = np.random.default_rng(seed)
    quantiles = np.sort(draw.lognormal(size=9)) * growth
    values = dict(zip((0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999), quantiles, strict=True))
    largest = None if lost else quantiles[-1] * 1.5
    return {
        "first": draw.lognormal() * 20,
        "quantiles": {f"{q:g}": value for q, value in values.items()} | ({"0.999": None} if lost else {}),
        "nonfinite": lost,
        "worst": [{"row": 1, "position": 5 + seed, "piece": f" the{seed}", "scale": largest}],
    }


def document(**after):
    norms = [
        {"norm": name, "c": None if name in KEPT else 0.5 + i, "before": entry(i), "after": entry(i + 50, **after)}
        for i, name in enumerate(NORMS)
    ]
    return {
        "schema_version": 1,
        "kind": "spread",
        "rows": 8,
        "context": 128,
        "text": "stories, sha256 01",
        "norms": norms,
        "provenance": {"weights_sha256": sha256(WEIGHTS).hexdigest()},
    }
