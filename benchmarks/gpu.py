"""Run the decoding benchmark on a GPU machine that has torch and the lab of this package: `benchmarks/gpu.sh`.

It trains an Internal-Taper (+aux) model of config/paper.yaml for a few steps, on the source text of Python's standard
library. It folds the model, runs the benchmarks of the config, and writes JSON and tables.
"""

import argparse
import hashlib
import sysconfig
import time
from array import array
from pathlib import Path

from tapernorm.checkpoints.store import load, save
from tapernorm.folding import fold
from tapernorm.models.decoder import Decoder
from tapernorm.util.atomic_files import write_json
from tapernorm_lab.config.load import load_config
from tapernorm_lab.config.run import Config
from tapernorm_lab.config.sections import paper_d_ff
from tapernorm_lab.data.manifest import made_manifest
from tapernorm_lab.experiments.pretrain import pretrain
from tapernorm_lab.experiments.speed.decode_speed import run_benchmark
from tapernorm_lab.report import table
from tapernorm_lab.report.frames import decoding as decode_rows
from tapernorm_lab.report.tables import table2_decoding as decode_tables
from tapernorm_lab.training.device import pick_device

PAPER = Path(__file__).parents[1] / "config/paper.yaml"
CAPTION = "Decoding benchmark on its own: a briefly trained model, whose speed is that of any model of its shape."
VALIDATION_TOKENS = 32768
MODES = ["eager", "cudagraph", "compile"]  # compilation takes longest, so it runs last


def main() -> None:
    """Train and fold the model, measure it, and write JSON and tables."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--width", type=int, default=512, help="d_model")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of training")
    parser.add_argument("--rounds", type=int, default=16, help="samples of every arm")
    parser.add_argument("--device", default="cuda", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="decoding modes")
    arguments = parser.parse_args()
    device, out = pick_device(arguments.device), arguments.out
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {what}", flush=True)

    config = briefly(
        arguments.width,
        arguments.steps,
        [
            f"hardware.device={device.type}",
            f"bench.dtype={'bfloat16' if device.type == 'cuda' else 'float32'}",
            f"bench.rounds={arguments.rounds}",
            f"bench.modes=[{', '.join(arguments.modes)}]",
        ],
    )
    write_library_bytes(out / "tokens", config.tokenizer.vocab_size)
    job = config.pretrain_job("internal_aux", arguments.width, config.seeds[0])
    result = pretrain(job, out / "tokens", out / "training", config.hardware)
    say(f"trained: validation loss {result['values']['valid_ce']['value']:.3f} nats/byte at g = 0")
    model = load(out / "training", Decoder).to(device).eval()
    folded, report = fold(model, fused=True)
    save(folded, out / "fused")
    write_json(out / "fold.json", report.as_dict())
    say(f"folded: largest logit difference {report.largest_logit_difference:.2g}")
    for kind, names in {"decode": ("table2", "table2x"), "last_token": ("table2v1",)}.items():
        path = out / f"{kind}.json"
        write_json(path, run_benchmark(kind, model, config.bench_job(), variant="internal_aux", device=device))
        measured = decode_rows.read(path, kind=f"bench_{kind}")
        for name in names:
            made = getattr(decode_tables, name)(measured, config.report_job())
            table.write(made, out / "tables")
            print(table.markdown(made))
        say(kind)


def briefly(width: int, steps: int, settings: list[str]) -> Config:
    """Return config/paper.yaml with one model of width `width` and `steps` steps, changed by `settings`."""
    model = f"{{d_model: {width}, d_ff: {paper_d_ff(width)}, label: brief, steps: {steps}, variants: [internal_aux]}}"
    training = ["train.log_every=10", "train.eval_every=0", "taper.start_fraction=0.3", "taper.ema_rate=0.1"]
    hardware = ["hardware.compile=false", "hardware.threads=1", f"hardware.checkpoint_every={steps}", "bench.threads=1"]
    return load_config(PAPER, ["run=gpu", f"caption={CAPTION!r}", f"widths=[{model}]", *training, *hardware, *settings])


def write_library_bytes(out: Path, vocab_size: int) -> None:
    """Write a token stream whose ids are the bytes of Python's standard library, a text present on every machine."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    splits = {}
    out.mkdir(parents=True, exist_ok=True)
    for split, part in {"train": text[:-VALIDATION_TOKENS], "valid": text[-VALIDATION_TOKENS:]}.items():
        ids = array("H", iter(part)).tobytes()
        (out / f"{split}.bin").write_bytes(ids)
        entry = {"documents": 1, "tokens": len(part), "bytes": len(part)}
        splits[split] = {**entry, "sha256": hashlib.sha256(ids).hexdigest()}
    sha256 = hashlib.sha256(text).hexdigest()
    manifest = made_manifest(
        "tokens",
        dtype="uint16",
        vocab_size=vocab_size,
        eod=0,
        tokenizer_sha256=sha256,
        tokenizer_corpus_sha256=sha256,
        corpus_sha256={split: entry["sha256"] for split, entry in splits.items()},
        splits=splits,
    )
    write_json(out / "manifest.json", manifest)


if __name__ == "__main__":
    main()
