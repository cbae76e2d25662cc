"""The decoding benchmark on a GPU machine with torch and the core of this package alone: `benchmarks/gpu.sh`.

Trains an Internal-Taper (+aux) model on the bytes of Python's own standard library, folds it, runs the whole
benchmark matrix, and writes JSON and tables.
"""

import argparse
import shutil
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor

from tapernorm.checkpoints.store import save
from tapernorm.folding import fold
from tapernorm.models.decoder import Decoder
from tapernorm.util.atomic_files import write_json
from tapernorm.util.hashing import canonical_json, digest
from tapernorm.util.rng import generator
from tapernorm_lab.config.jobs import BenchJob, PretrainJob
from tapernorm_lab.config.sections import BenchConfig, HardwareConfig, paper_d_ff
from tapernorm_lab.experiments.pretrain import attach_variant
from tapernorm_lab.experiments.speed.decode_speed import run_benchmark
from tapernorm_lab.report import table
from tapernorm_lab.report.frames import decoding as decode_rows
from tapernorm_lab.report.tables import table2_decoding as decode_tables
from tapernorm_lab.training.device import pick_device
from tapernorm_lab.training.plan import Optimisation, Plan
from tapernorm_lab.training.trainer import Trainer
from tapernorm_lab.training.validation_loss import Evaluation, evaluate

CAPTION = "Decoding benchmark on its own: a briefly trained model, whose speed is that of any model of its shape."
VALIDATION_TOKENS = 32768
MODES = ["eager", "cudagraph", "compile"]  # compilation last: it takes longest


def main() -> None:
    """Train, fold, measure, write."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--width", type=int, default=512, help="d_model")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of training")
    parser.add_argument("--rounds", type=int, default=16, help="samples of every arm")
    parser.add_argument("--device", default="cuda", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="decoding modes")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {what}", flush=True)

    model = trained(arguments.width, arguments.steps, device, arguments.out)
    say("trained")
    folded, report = fold(model, fused=True)
    save(folded, arguments.out / "fused")
    write_json(arguments.out / "fold.json", report.as_dict())
    say(f"folded: largest logit difference {report.largest_logit_difference:.2g}")
    job = bench_job(arguments.rounds, "bfloat16" if device.type == "cuda" else "float32", arguments.modes)
    tables = {"decode": ("table2", "table2x"), "last_token": ("table2v1",)}
    for kind, names in tables.items():
        path = arguments.out / f"{kind}.json"
        write_json(path, run_benchmark(kind, model, job, variant="internal_aux", device=device))
        measured = decode_rows.read(path, kind=f"bench_{kind}")
        for name in names:
            made = getattr(decode_tables, name)(measured, run=job.run, caption=CAPTION)
            table.write(made, arguments.out / "tables")
            print(table.markdown(made))
        say(kind)


def bench_job(rounds: int, dtype: str, modes: list[str]) -> BenchJob:
    """The matrix of config/paper.yaml."""
    bench = {
        "dtype": dtype,
        "batches": [1, 4],
        "prompts": [128, 256, 512],
        "new_tokens": 256,
        "block": 64,
        "rounds": rounds,
        "warmup": 2,
        "threads": 1,
        "modes": modes,
    }
    return BenchJob(run="gpu", bench=BenchConfig.model_validate(bench))


def trained(width: int, steps: int, device: torch.device, out: Path) -> Decoder:
    """An Internal-Taper (+aux) model of the paper's shape at g = 0."""
    job = PretrainJob.model_validate(training_job(width, steps))
    tokens, held_out = standard_library_bytes()
    model = Decoder(job.model).initialize(generator(job.seed, "init")).to(device)
    taper = attach_variant(model, job)

    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(tokens) - job.model.context, (job.train.batch,), generator=generator(0, f"{step}"))
        both = torch.stack([tokens[start : start + job.model.context + 1] for start in starts.tolist()]).long()
        return both[:, :-1], both[:, 1:]

    def validate() -> Evaluation:
        shape = {"context": job.model.context, "batch": job.train.batch}
        return evaluate(model, held_out, text_bytes=len(held_out), device=device, **shape)

    hardware = HardwareConfig(
        device="auto",
        threads=1,
        compile=False,
        micro_batch=None,
        checkpoint_every=steps,
        tensorboard=False,
        activation_checkpointing=False,
        jobs_per_gpu=1,
        devices_per_job=1,
    )
    plan = Plan(
        label=f"internal_aux d{width}",
        seed=job.seed,
        steps=steps,
        optimisation=Optimisation.of_pretraining(job.train, steps),
        hardware=hardware,
        batch_at=batch_at,
        validate=validate,
        tokens_per_step=job.train.batch * job.model.context,
        fingerprint=digest(canonical_json(job)),
        folder=out / "training",
    )
    score = Trainer(model, taper, plan).run()
    shutil.rmtree(plan.folder)
    print(f"validation loss {score.ce:.3f} nats/byte at g = 0")
    return model.eval()


def training_job(width: int, steps: int) -> dict[str, object]:
    """The paper's protocol at its 30M shape (or another width), for a few steps."""
    return {
        "variant": "internal_aux",
        "seed": 0,
        "steps": steps,
        "model": {
            "vocab_size": 10000,
            "d_model": width,
            "n_layer": 8,
            "n_head": 16,
            "n_kv_head": 16,
            "d_ff": paper_d_ff(width),
            "context": 512,
            "norm": "rmsnorm",
            "norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_head": True,
        },
        "train": {
            "batch": 16,
            "lr": 3e-4,
            "warmup_fraction": 0.05,
            "betas": [0.9, 0.95],
            "adam_eps": 1e-8,
            "weight_decay": 0.0,
            "clip_norm": 1.0,
            "precision": "bf16",
            "log_every": 10,
            "eval_every": 0,
        },
        "taper": {"start_fraction": 0.3, "end_fraction": 1.0, "ema_rate": 0.1, "anchor_weight": 0.1},
    }


def standard_library_bytes() -> tuple[Tensor, Tensor]:
    """Training and held-out bytes, as ids below 256: real text that every machine with Python has."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    raw = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return raw[:-VALIDATION_TOKENS], raw[-VALIDATION_TOKENS:]


if __name__ == "__main__":
    main()
