"""`fake_engine.py '{...}'`: a worker whose engine counts up from the prompt, and writes down when it was asked."""

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.rivals.workers import Unavailable, answer  # noqa: E402


class Fake:
    """Next tokens are the last one plus `step`; the time it tells is `seconds`."""

    def __init__(self, *, name, journal, step=1, seconds=1.0, loss=2.0, missing="", fails=""):
        if missing:
            raise Unavailable(missing)
        self.name, self.journal, self.step, self.seconds, self.value, self.fails = (
            name,
            journal,
            step,
            seconds,
            loss,
            fails,
        )
        self.facts = {"release": "fake 1"}
        print("what an engine prints is no answer")

    def decode(self, prompt, new_tokens):
        began = time.time()
        if self.fails:
            raise ValueError(f"{self.fails}\nand a second line")
        tokens = [prompt[-1] + self.step * (i + 1) for i in range(new_tokens)]
        with open(self.journal, "a", encoding="utf-8") as file:
            file.write(json.dumps([self.name, began, time.time()]) + "\n")
        return tokens, self.seconds

    def loss(self, windows):
        return self.value * len(windows)


if __name__ == "__main__":
    answer(lambda: Fake(**json.loads(sys.argv[1])))
