"""Compare greedy decoding with other engines, at the paper's smallest and largest width: `make bench-rivals`."""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tapernorm.util.atomic_files import write_json
from tapernorm.util.provenance import code_commit, provenance
from tapernorm_lab.data.token_stream import TokenStream

from .arms import ARMS, ENGINES, REFERENCE, RIVAL, Arm
from .comparison import SETTLE_S, Workload, compare
from .table import lines
from .workers import Worker

SCHEMA_VERSION = 1
PROMPT = 32
WINDOWS, WINDOW = 4, 64
NEW_TOKENS = {64: 192, 512: 48}
ROUNDS, SECONDS = {64: 15, 512: 9}, 110  # at most; a slow machine ends with fewer rounds


def main() -> None:
    """Measure the comparisons that the output file lacks, and write it after each, so that a rerun resumes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    parser.add_argument("--models", type=Path, required=True, help="folder with tokens/, d64/ and d512/")
    parser.add_argument("--rivals", default="python", help="the Python that has the other engines")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the rows")
    parser.add_argument("--widths", type=int, nargs="*", default=sorted(NEW_TOKENS), help="d_model of the models")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    arguments = parser.parse_args()
    for width in arguments.widths:
        for threads in arguments.threads:
            job = describe(arguments.models, width, threads)
            known = read(arguments.out)
            if any(is_done(found, job) for found in known):
                print(f"d {width}, threads {threads}: measured before, in {arguments.out}")
                continue
            found = measure(job, arguments.models, arguments.rivals)
            others = [c for c in known if (c["job"]["d_model"], c["job"]["threads"]) != (width, threads)]
            whole = sorted([*others, found], key=lambda c: (c["job"]["d_model"], c["job"]["threads"]))
            write_json(arguments.out, {"schema_version": SCHEMA_VERSION, "comparisons": whole})
            print(f"d {width}, threads {threads}\n{lines(found)}", flush=True)


def describe(models: Path, width: int, threads: int) -> dict[str, Any]:
    """Return the inputs on which the numbers of a comparison depend, apart from machine and code."""
    weights = (models / f"d{width}/model.safetensors").read_bytes()
    return {
        "d_model": width,
        "threads": threads,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "prompt": PROMPT,
        "new_tokens": NEW_TOKENS[width],
        "rounds": ROUNDS[width],
        "arms": [asdict(arm) for arm in ARMS],
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Return the comparisons in the output file, or none if it is absent."""
    return json.loads(path.read_text(encoding="utf-8"))["comparisons"] if path.is_file() else []


def is_done(found: dict[str, Any], job: dict[str, Any]) -> bool:
    """Return whether `found` was measured for this job, by the committed code that runs now."""
    commit = code_commit()
    return found["job"] == job and found["provenance"]["commit"] == commit and not str(commit).endswith("+dirty")


def measure(job: dict[str, Any], models: Path, rivals: str) -> dict[str, Any]:
    """Measure one comparison, and return its job, provenance and rows."""
    tokens = TokenStream.open(models / "tokens", "valid").tokens.tolist()
    prompt, text = tokens[:PROMPT], tokens[PROMPT:]
    windows = [text[i * WINDOW : (i + 1) * WINDOW] for i in range(WINDOWS)]
    work = Workload(prompt, job["new_tokens"], windows, rounds=job["rounds"], warmup=1, seconds=SECONDS)
    settle_s = SETTLE_S if job["threads"] > 1 else 0.0
    folder = (models / f"d{job['d_model']}").resolve()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as logs:

        def start(arm: Arm) -> Worker:
            return worker(arm, folder, job["threads"], rivals, Path(logs))

        rows = compare(ARMS, start, work, reference=REFERENCE, rival=RIVAL, settle_s=settle_s)
    facts = provenance(cores=os.cpu_count(), load_before=load_before, load_after=os.getloadavg()[0])
    return {"job": job, "provenance": facts, "rows": rows}


def worker(arm: Arm, folder: Path, threads: int, rivals: str, logs: Path) -> Worker:
    """Start the process of an arm."""
    job = {"engine": ENGINES[arm.engine], "model": str(folder), "threads": threads, "weights": arm.weights}
    python = sys.executable if arm.place == "own" else rivals
    command = [python, "-m", "benchmarks.rivals.worker", json.dumps({**job, **arm.options})]
    threaded = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return Worker(command, log=logs / f"{arm.name}.log", environment=threaded)


if __name__ == "__main__":
    main()
