"""The comparison of one model at one number of threads: tokens are compared first, then workers are timed in rounds."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tapernorm_lab.experiments.speed.interleaved_timing import bootstrap_median, paired_speedup, turns

from .arms import Arm
from .workers import Unavailable, Worker

SETTLE_S = 0.3  # before a request to an arm of several threads: those of the last one may spin for 0.2 s


@dataclass(frozen=True)
class Workload:
    """The requests to every arm.

    Attributes:
        prompt: token ids of the prompt.
        new_tokens: number of tokens to decode.
        windows: validation text (N, T), on which the reference and arms that are not float32 report their loss.
        rounds: number of timed rounds.
        warmup: number of rounds before them.
    """

    prompt: Sequence[int]
    new_tokens: int
    windows: Sequence[Sequence[int]]
    rounds: int
    warmup: int
    seconds: float = math.inf  # no round starts later


def compare(
    arms: Sequence[Arm],
    start: Callable[[Arm], Worker],
    work: Workload,
    *,
    reference: str,
    rival: str,
    settle_s: float,
) -> list[dict[str, Any]]:
    """Measure every arm, and return a row for each: its speed and the ratio to `rival`, or why it has none.

    Args:
        arms: the arms, in the order of the rows.
        start: starts the worker of an arm, or raises Unavailable.
        work: the requests to every arm.
        reference: name of the arm whose tokens every float32 arm must give. It must run.
        rival: name of the arm to which speeds are compared, paired by round.
        settle_s: pause before each timed request, in seconds.

    Raises:
        Unavailable: the reference does not run.
    """
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        rows: dict[str, dict[str, Any]] = {arm.name: _blank(arm) for arm in arms}
        for arm in arms:
            try:
                workers[arm.name] = stack.enter_context(start(arm))
                rows[arm.name]["facts"] = workers[arm.name].facts
            except Unavailable as missing:
                rows[arm.name] |= {"state": "skipped", "reason": str(missing)}
        if reference not in workers:
            raise Unavailable(f"{reference} does not run: {rows[reference]['reason']}")
        right, _ = workers[reference]("decode", work.prompt, work.new_tokens)
        for arm in (arm for arm in arms if arm.name in workers):
            try:
                checked = _checked(arm, workers[arm.name], work, right, with_loss=arm.name == reference)
            except Unavailable as failed:
                checked = {"state": "skipped", "reason": str(failed)}
            rows[arm.name] |= checked
        timed = {arm.name: workers[arm.name] for arm in arms if rows[arm.name]["state"] == "measured"}
        for name, samples in _timed(timed, work, settle_s).items():
            rows[name]["seconds"] = samples
        return [row | _speeds(rows, name, rival, work) for name, row in rows.items()]


def _blank(arm: Arm) -> dict[str, Any]:
    told = {"arm": arm.name, "engine": arm.engine, "weights": arm.weights, "mode": arm.mode}
    return {**told, "state": "measured", "reason": None, "facts": {}, "equal_tokens": None, "loss": None, "seconds": []}


def _checked(arm: Arm, worker: Worker, work: Workload, right: Sequence[int], *, with_loss: bool) -> dict[str, Any]:
    """Return the share of its tokens that are correct, its loss if some may differ, and the reason to refuse it."""
    tokens, _ = worker("decode", work.prompt, work.new_tokens)
    equal = sum(a == b for a, b in zip(tokens, right, strict=False))
    found: dict[str, Any] = {"equal_tokens": equal / len(right)}
    if with_loss or not arm.is_exact:
        found["loss"] = worker("loss", work.windows)
    if arm.is_exact and tokens != right:
        first = next((i for i, (a, b) in enumerate(zip(tokens, right, strict=False)) if a != b), len(tokens))
        found |= {"state": "refused", "reason": f"its greedy tokens differ from the {first + 1}th on"}
    return found


def _timed(workers: Mapping[str, Worker], work: Workload, settle_s: float) -> dict[str, list[float]]:
    """Return the seconds of each arm in each round. The order of the arms rotates by one each round."""
    samples: dict[str, list[float]] = {name: [] for name in workers}
    began = time.monotonic()
    for place, (index, name) in enumerate(turns(workers, rounds=work.rounds, warmup=work.warmup)):
        if place % len(workers) == 0 and time.monotonic() - began > work.seconds:
            break
        time.sleep(settle_s)
        _, seconds = workers[name]("decode", work.prompt, work.new_tokens)
        if index >= 0:
            samples[name].append(seconds)
    return samples


def _speeds(rows: Mapping[str, Any], name: str, rival: str, work: Workload) -> dict[str, Any]:
    """Return tokens_per_s and over_rival, each with value, low and high. Without samples both are None."""
    samples = {arm: row["seconds"] for arm, row in rows.items()}
    if not samples[name]:
        return {"tokens_per_s": None, "over_rival": None}
    speed = bootstrap_median([(work.new_tokens - 1) / seconds for seconds in samples[name]])
    ratio = paired_speedup(samples, name, rival) if samples[rival] else None
    return {"tokens_per_s": vars(speed), "over_rival": ratio and vars(ratio)}
