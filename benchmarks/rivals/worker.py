"""Serve one engine with its model over a pipe: `python -m benchmarks.rivals.worker '{"engine": ..., ...}'`."""

import importlib
import json
import sys
from pathlib import Path

from .workers import Decoding, answer


def load(job: dict[str, object]) -> Decoding:
    """Load the engine that `job` names, with the other entries of `job` as arguments."""
    module, kind = str(job.pop("engine")).split(":")
    made = getattr(importlib.import_module(f".{module}", __package__), kind)
    return made(Path(str(job.pop("model"))), **job)


if __name__ == "__main__":
    answer(lambda: load(json.loads(sys.argv[1])))
