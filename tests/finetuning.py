"""A tiny GPT-2 fine-tune on made-up blocks: its job for each method, its base model, and its command line."""

from pathlib import Path
from typing import Any

import numpy as np
from training import HARDWARE, VOCABULARY

from tapernorm.checkpoints.store import save
from tapernorm.util.atomic_files import sha256_of, write_json
from tapernorm.util.hashing import canonical_json
from tapernorm.util.rng import generator
from tapernorm_lab.config.gpt2 import TAPERED, Gpt2Shape
from tapernorm_lab.config.jobs import FinetuneJob
from tapernorm_lab.config.sections import HardwareConfig
from tapernorm_lab.models.gpt2 import fresh

CONTEXT, BATCH, MICRO_BATCH, STEPS, EOT = 9, 4, 2, 14, 1
N_LAYER = 2
TAPER = {"start": 3, "end": 10}
# removals at steps 3, 4 (mlp), 5, 6 (q and k), 7, 8 (v) and 10 (final)
FAKELN = {"mlp_start": 3, "mlp_gap": 1, "qk_start": 5, "qk_gap": 1, "v_start": 7, "v_gap": 1, "final": 10}
MICRO = HARDWARE.model_copy(update={"micro_batch": MICRO_BATCH})


def make_job(method: str = "all_aux", **changes: Any) -> FinetuneJob:
    """The tiny job of `method`; changes: a setting of the job or of its `train` section, by its name."""
    raw: dict[str, Any] = {
        "method": method,
        "size": "tiny",
        "seed": 3,
        "context": CONTEXT,
        "steps": STEPS,
        "lr": 1e-2,
        "min_lr": 2e-3,
        "warmup_steps": 2,
        "decay_steps": 20,
        "batch": BATCH,
        "train": {
            "betas": [0.9, 0.999],
            "adam_eps": 1e-8,
            "weight_decay": 0.01,
            "clip_norm": 1.0,
            "precision": "float32",
            "ema_rate": 0.1,
            "log_every": 1,
            "eval_every": 0,
        },
        "aux_weight": 0.0 if method == "vanilla" else 0.1,
        "taper": TAPER if method in TAPERED else None,
        "fakeln": {**FAKELN, "ema_rate": 1.0} if method == "fakeln" else None,
        "micro_batch": MICRO_BATCH if method == "fakeln" else None,
    }
    for key, value in changes.items():
        (raw if key in raw else raw["train"])[key] = value
    return FinetuneJob.model_validate(raw)


def write_blocks(folder: Path, *, train: int = 90, valid: int = 7, context: int = CONTEXT, seed: int = 0) -> Path:
    """A folder of `train` and `valid` blocks; the next id mostly follows from the one before, some are end-of-text."""
    folder.mkdir(parents=True)
    splits = {}
    for name, rows in {"train": train, "valid": valid}.items():
        draw = np.random.default_rng([seed, rows])
        steps = np.where(draw.random((rows, context)) < 0.8, 7, draw.integers(VOCABULARY, size=(rows, context)))
        ids = np.cumsum(steps, axis=1) % VOCABULARY
        ids[draw.random((rows, context)) < 0.1] = EOT
        ids.astype("uint16").tofile(folder / f"{name}.bin")
        entry = {"rows": rows, "documents": rows, "tokens_dropped": 0}
        splits[name] = entry | {"sha256": sha256_of(folder / f"{name}.bin")}
    manifest = {
        "schema_version": 1,
        "kind": "blocks",
        "dtype": "uint16",
        "vocab_size": VOCABULARY,
        "eod": EOT,
        "context": context,
        "block_documents": None,
        "tokenizer_sha256": "0" * 64,
        "splits": splits,
        "details": {},
        "provenance": {},
    }
    write_json(folder / "manifest.json", manifest)
    return folder


def write_base(folder: Path, *, dropout: float = 0.1, n_layer: int = N_LAYER) -> Path:
    """The folder of a GPT-2 with random weights."""
    shape = Gpt2Shape(d_model=12, n_layer=n_layer, n_head=3, dropout=dropout, norm_eps=1e-5)
    save(fresh(shape, vocab_size=VOCABULARY, context=CONTEXT, generator=generator(5, "init")), folder)
    return folder


def command(job: FinetuneJob, base: Path, blocks: Path, out: Path, hardware: HardwareConfig = MICRO) -> list[str]:
    """Arguments of `tapernorm` that run `job`."""
    settings = ["--job", canonical_json(job), "--hardware", canonical_json(hardware)]
    return ["finetune", *settings, "--base", str(base), "--blocks", str(blocks), "--out", str(out)]
