"""A tiny pre-training job on a made-up token stream, and what two runs of it must have in common."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tapernorm.util.atomic_files import sha256_of, write_json
from tapernorm.util.hashing import canonical_json
from tapernorm_lab.config.jobs import PretrainJob
from tapernorm_lab.config.sections import HardwareConfig
from tapernorm_lab.config.study import Arm
from tapernorm_lab.config.variants import Variant

torch.set_num_threads(1)

VOCABULARY = 61
HARDWARE = HardwareConfig(
    device="cpu",
    threads=1,
    linear="aten",
    compile=False,
    micro_batch=None,
    checkpoint_every=4,
    tensorboard=False,
    activation_checkpointing=False,
    jobs_per_gpu=1,
    devices_per_job=1,
)


def checkpointing(every: int) -> HardwareConfig:
    """The usual hardware with a checkpoint every `every` steps."""
    return HARDWARE.model_copy(update={"checkpoint_every": every})


TIMES = {"tokens_per_s", "elapsed_s"}  # of a metrics row
MEASURED = {"train_time_s", "tokens_per_s", "peak_mem_bytes"}  # of a result's values

_JOB = {
    "seed": 3,
    "steps": 12,
    "model": {
        "vocab_size": VOCABULARY,
        "d_model": 12,
        "n_layer": 2,
        "n_head": 2,
        "n_kv_head": 1,
        "d_ff": 20,
        "context": 8,
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_head": True,
    },
    "train": {
        "batch": 4,
        "lr": 1e-2,
        "warmup_fraction": 0.25,
        "betas": [0.9, 0.95],
        "adam_eps": 1e-8,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
        "precision": "float32",
        "log_every": 1,
        "eval_every": 0,
    },
    "taper": {"start_fraction": 0.25, "end_fraction": 1.0, "ema_rate": 0.1, "anchor_weight": 0.1},
}
START = 3  # k_start, and the end of the learning-rate warm-up
STEPS = 12


def make_arm(variant: str, **fields: Any) -> Arm:
    """The arm of this variant."""
    made = Variant.named(variant)
    return Arm.model_validate({"taper": made.taper, "anchor": made.anchor, **fields})


def make_job(variant: str = "all_aux", **changes: Any) -> PretrainJob:
    """The tiny job of `variant`; changes: a setting of any section, by its name."""
    raw: dict[str, Any] = {"variant": variant, **json.loads(json.dumps(_JOB))}
    for key, value in changes.items():
        holder = next(part for part in (raw, raw["model"], raw["train"], raw["taper"]) if key in part)
        holder[key] = value
    if variant == "baseline":
        raw["taper"] = None
    elif not Variant.named(variant).anchored:
        raw["taper"]["anchor_weight"] = 0.0
    return PretrainJob.model_validate(raw)


def write_stream(folder: Path, *, train: int = 900, valid: int = 101, seed: int = 0) -> Path:
    """A token folder of `train` and `valid` ids; the next id mostly follows from the one before."""
    folder.mkdir(parents=True)
    splits = {}
    for name, count in {"train": train, "valid": valid}.items():
        draw = np.random.default_rng([seed, count])
        steps = np.where(draw.random(count) < 0.8, 7, draw.integers(VOCABULARY, size=count))
        (np.cumsum(steps) % VOCABULARY).astype("uint16").tofile(folder / f"{name}.bin")
        entry = {"documents": 1, "tokens": count, "bytes": 4 * count}
        splits[name] = entry | {"sha256": sha256_of(folder / f"{name}.bin")}
    manifest = {"schema_version": 1, "kind": "tokens", "dtype": "uint16", "vocab_size": VOCABULARY, "eod": 1}
    write_json(folder / "manifest.json", {**manifest, "splits": splits})
    return folder


def command(job: PretrainJob, tokens: Path, out: Path, hardware: HardwareConfig = HARDWARE) -> list[str]:
    """Arguments of `tapernorm` that run `job`."""
    settings = ["--job", canonical_json(job), "--hardware", canonical_json(hardware)]
    return ["pretrain", *settings, "--tokens", str(tokens), "--out", str(out)]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The rows of a finished run, their times apart."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def outcome_of(run: Path, details: Sequence[str] = ("norms", "scale_target")) -> dict[str, Any]:
    """All that a finished run computed, as plain numbers; its times and its memory apart."""
    result = json.loads((run / "result.json").read_text())
    return {
        "metrics": metrics_of(run),
        "weights": {name: value.tolist() for name, value in load_file(run / "model.safetensors").items()},
        "config": json.loads((run / "config.json").read_text()),
        "values": {name: value for name, value in result["values"].items() if name not in MEASURED},
        **{name: result[name] for name in details},
        "job": result["job"],
    }


def leftovers(run: Path) -> list[str]:
    """What a finished run keeps besides its results, its lock and its mark."""
    published = {"metrics.jsonl", "model.safetensors", "config.json", "result.json", "lock", ".tapernorm.json"}
    return sorted(path.name for path in run.iterdir() if path.name not in published)
