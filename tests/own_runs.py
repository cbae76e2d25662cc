"""Folders as `tapernorm taper` leaves them, made without training."""

from scale_files import NORMS, WEIGHTS, document

from tapernorm.util.atomic_files import write_json

GONE = [name for name in NORMS if name not in ("model.layers.1.a", "model.norm")]


def statistics(mean):
    ways = ("mean", "median", "trimmed_mean", "p99_9", "max")
    rows = {name: None if mean is None else mean + i for i, name in enumerate(ways)} | {"nonfinite": 0}
    return {"rows": rows, "tokens": {"median": 0.5, "p99_9": 9.0}, "bits_per_byte": mean and mean / 2}


def write_run(folder, *, after, before=2.0, steps=300):
    """The files of a finished taper that tables are made from."""
    result = {
        "schema_version": 1,
        "kind": "finetune",
        "job": {
            "steps": steps,
            "batch": 4,
            "context": 128,
            "lr": 6e-4,
            "aux_weight": 0.1,
            "level_weight": 0.2,
            "seed": 1,
            "taper": {"start": 30, "end": 210},
            "train": {"precision": "float32"},
        },
        "values": {"train_time_s": {"value": 5400.0, "unit": "s"}},
        "base": {"source": "models/base.gguf", "digest": "0123abcd", "data": "stories, sha256 01"},
        "norms": {name: {"c": 1.0} for name in GONE},
        "provenance": {
            "commit": "c0ffee",
            "device": "cpu",
            "packages": {"torch": "2.13.0", "transformers": "5.24.0"},
        },
    }
    write_json(folder / "result.json", result)
    corpora = {"held-out": {"before": statistics(before), "after": statistics(after)}}
    scales = document()
    told = {"corpora": corpora, "provenance": scales["provenance"]}
    write_json(folder / "scores.json", {"schema_version": 1, "kind": "scores", **told})
    write_json(folder / "spread.json", scales)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder
