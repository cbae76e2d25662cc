"""Overheads of the pipeline: start-up of the command line, the workflow engine, and memory."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .report import Figure, figure

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
RUN = "bench-demo"  # a separate run of the demo
CORES = 2


def measure() -> Iterator[Figure]:
    """Yield the figures of the command line and of one complete run of the demo, which takes minutes."""
    help_s = [_seconds("tapernorm", "--help") for _ in range(10)]
    yield figure("cli.help", help_s, "s", at_most=0.5)
    dry_run = ("snakemake", "-n", "tables", "figures", "--configfile", "config/paper.yaml")
    yield figure("workflow.paper_dry_run", [_seconds(*dry_run) for _ in range(3)], "s", at_most=10)
    yield from _demo()
    yield figure("pretrain.start_to_first_step", [_first_step_s() for _ in range(5)], "s", at_most=5)


def _seconds(*command: str) -> float:
    began = time.perf_counter()
    subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, check=True)
    return time.perf_counter() - began


def _demo() -> Iterator[Figure]:
    """Yield the demo's wall time, the engine's overhead over its jobs, and the memory of its largest job."""
    results = ROOT / "results" / RUN
    for folder in (results, ROOT / "figures" / RUN):
        shutil.rmtree(folder, ignore_errors=True)
    began = time.time()
    command = ("snakemake", "--cores", str(CORES), "tables", "figures", "--config", f"run={RUN}")
    wall_s = _seconds(*command)
    yield figure("demo.wall_time", wall_s, "s", at_most=300)
    ideal_s = _core_seconds(began) / CORES
    yield figure("demo.overhead_over_jobs", 100 * (wall_s / ideal_s - 1), "%", at_most=10)
    values = [json.loads(path.read_text())["values"] for path in results.rglob("result.json")]
    peaks = [found["peak_mem_bytes"]["value"] for found in values if "peak_mem_bytes" in found]
    yield figure("demo.largest_job_memory", max(peaks) / 1e9, "GB", at_most=0.45)
    yield figure("demo.memory_of_imports", _import_bytes() / 1e9, "GB")


def _core_seconds(since: float) -> float:
    """Return the core-seconds of all jobs that Snakemake recorded after `since`. A benchmark occupies all cores."""
    jobs: dict[str, float] = {}  # by log file: each output of a job has its own record
    for path in (ROOT / ".snakemake" / "metadata").iterdir():
        record = json.loads(path.read_text())
        if record["starttime"] >= since:
            cores = CORES if record["rule"] == "bench" else 1
            jobs[record["log"][0]] = cores * (record["endtime"] - record["starttime"])
    return sum(jobs.values())


def _import_bytes() -> int:
    """Return the peak memory of a process that imports what a GPT-2 fine-tune imports, and ends."""
    code = "import tapernorm_lab.experiments.finetune as _; print(open('/proc/self/status').read())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return 1024 * int(re.findall(r"VmHWM:\s*(\d+) kB", done.stdout)[0])


def _first_step_s() -> float:
    """Return the seconds from the start of a training process to the record of its first optimizer step."""
    with tempfile.TemporaryDirectory() as folder:
        selected = ("--variant", "internal_aux", "--width", "48", "--seed", "1")
        places = ("--tokens", f"results/{RUN}/data/tokens", "--out", folder)
        command = [str(BIN / "tapernorm"), "pretrain", "--config", "config/demo.yaml", *selected, *places]
        began = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
            while not any(p.stat().st_size for p in Path(folder).glob("resume/*/metrics.jsonl")):
                if job.poll() is not None:
                    raise RuntimeError(f"the training job ended with status {job.returncode} before its first step")
                time.sleep(0.01)
            took = time.perf_counter() - began
            job.kill()
    return took
