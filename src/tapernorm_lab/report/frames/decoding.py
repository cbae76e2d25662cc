"""Decoding benchmarks: from the JSON to one row per phase, mode, batch, prompt and arm."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapernorm.util.errors import UserError

from ...config.variants import VARIANT_LABELS
from ...experiments.speed.interleaved_timing import (
    Interval,
    Samples,
    bootstrap_median,
    paired_speedup,
)
from ..engine.frame import Field, Frame, Row, integer, number, text
from ..read_json import read_document, value_at

NAN = math.nan

DECODE, LAST_TOKEN, REPLACEMENTS = "bench_decode", "bench_last_token", "bench_rivals"  # the kinds of file
BASELINES = ("baseline", "baseline_naive")  # with F.rms_norm, and with the several-op norm
ARMS = ("baseline_naive", "baseline", "unfused", "fused", "identity")
REPLACEMENT_ARMS = ("dyt", "derf")  # further arms in files of the kind bench_rivals
MODES = {"eager": "eager", "compile": "torch.compile", "cudagraph": "CUDA graph"}
PHASES = ("decode", "prefill", "forward")
CELL = ("phase", "mode", "batch", "prompt")  # the arms of one cell are paired round by round

FRAME = Frame(
    file="{}.json",
    key=(*CELL, "arm"),
    verb="bench",
    fields={  # facts that all rows of a file share
        "variant": text("job.variant"),
        "d_model": integer("job.d_model"),
        "n_layer": integer("job.n_layer"),
        "n_head": integer("job.n_head"),
        "vocab_size": integer("job.vocab_size"),
        "dtype": text("job.dtype"),
        "warmup": integer("job.warmup", "untimed rounds"),
        "device": text("machine.device"),
        "threads": integer("machine.threads"),
        "tf32": Field("flag", "machine.tf32"),  # null if the device has no TF32
        "load_before": number("machine.load_before"),  # load of the machine; null if it reports none
        "load_after": number("machine.load_after"),
        "torch": text("provenance.packages.torch"),
        "python": text("provenance.python"),
        "commit": text("provenance.commit"),  # null outside git
        "new_tokens": integer("job.new_tokens", of="decode"),
        "block": integer("job.block", "steps between synchronisations", of="decode"),
    },
)
_ENTRY = (*CELL, "arm", "seconds", "tokens", "bytes_per_token")

Cell = tuple[Any, ...]


@dataclass(frozen=True)
class Bench:
    """The summary of a benchmark file."""

    rows: list[Row]
    facts: Row  # columns that all rows share
    clocks: Mapping[str, Any]
    checks: Mapping[str, Mapping[str, float]]  # arm -> largest_logit_difference, logit_scale
    unavailable: Mapping[str, str]  # mode -> why it could not be measured
    read_bandwidth: Interval | None  # bytes/s, measured on the same device

    @property
    def records(self) -> list[Row]:
        """Every row with the facts of the file."""
        return [{**row, **self.facts} for row in self.rows]

    def where(self, **values: object) -> list[Row]:
        """Return the rows whose columns have these values."""
        return [row for row in self.rows if all(row[column] == value for column, value in values.items())]


def read(path: Path, *, kind: str = DECODE) -> Bench:
    """Read and summarise one benchmark file of this `kind`.

    Raises:
        UserError: the file is missing, damaged, of another kind or schema, or its samples cannot be paired.
    """
    path = Path(path)
    document = read_document(path, kind)
    facts = FRAME.facts(document, path) | ({} if kind == LAST_TOKEN else FRAME.facts(document, path, of="decode"))
    if facts["variant"] not in VARIANT_LABELS:
        raise UserError(f"{path} timed the variant {facts['variant']!r}: time a model of {', '.join(VARIANT_LABELS)}")
    bandwidth = (document.get("read_bandwidth") or {}).get("bytes_per_s")
    read_bandwidth = bootstrap_median(bandwidth) if bandwidth else None
    facts["read_bytes_per_s"] = read_bandwidth.value if read_bandwidth else NAN
    return Bench(
        rows=bench_rows(value_at(document, "cells", path), facts["read_bytes_per_s"], str(path)),
        facts=facts,
        clocks=value_at(document, "machine", path).get("clocks") or {},
        checks=value_at(document, "checks", path),
        unavailable={entry["mode"]: entry["reason"] for entry in value_at(document, "unavailable", path)},
        read_bandwidth=read_bandwidth,
    )


def bench_rows(
    cells: Sequence[Mapping[str, Any]], read_bytes_per_s: float = NAN, where: str = "the bench"
) -> list[Row]:
    """Return one row per entry of `cells`, ordered by phase, mode, batch, prompt and arm.

    Columns: n (rounds), tokens (per sample), tokens_per_s, ratio_baseline and ratio_baseline_naive (speed relative to
    each Baseline, paired by round), each with _low and _high (95 % bootstrap, NaN with one round);
    bytes_per_token; bytes_per_s = bytes_per_token * tokens_per_s; read_share = bytes_per_s / read_bytes_per_s.

    Args:
        read_bytes_per_s: read bandwidth of the device.
        where: name of the benchmark in messages.

    Raises:
        UserError: there are no samples, a name is unknown, an arm is missing or given twice, or rounds do not pair.
    """
    if not cells:
        raise UserError(f"{where} holds no samples, as none of its modes could be measured: choose other modes")
    names = {"phase": PHASES, "mode": MODES, "arm": (*ARMS, *REPLACEMENT_ARMS)}
    groups: dict[Cell, dict[str, Mapping[str, Any]]] = {}
    for entry in cells:
        if odd := [key for key in _ENTRY if key not in entry or (key in names and entry[key] not in names[key])]:
            raise UserError(f"{where}: this version does not know the {', '.join(odd)} of a cell: run the bench again")
        arms = groups.setdefault(tuple(entry[key] for key in CELL), {})
        if entry["arm"] in arms:
            raise UserError(f"{where}: {entry['arm']} is given twice at {named(entry)}: run the bench again")
        arms[entry["arm"]] = entry
    return [row for cell in sorted(groups, key=_order) for row in _cell_rows(groups[cell], read_bytes_per_s, where)]


def _order(cell: Cell) -> Cell:
    phase, mode, batch, prompt = cell
    return PHASES.index(phase), list(MODES).index(mode), batch, prompt


def _cell_rows(arms: Mapping[str, Mapping[str, Any]], read_bytes_per_s: float, where: str) -> list[Row]:
    """Return the rows of one cell."""
    _refuse_unpaired(arms, where)
    samples: Samples = {arm: entry["seconds"] for arm, entry in arms.items()}
    rows = []
    for arm in (*ARMS, *(arm for arm in REPLACEMENT_ARMS if arm in arms)):
        entry = arms[arm]
        speed = bootstrap_median([entry["tokens"] / seconds for seconds in entry["seconds"]])
        row = {**{key: entry[key] for key in (*CELL, "arm", "tokens")}, "n": speed.n, **_spread("tokens_per_s", speed)}
        for baseline in BASELINES:
            row |= _spread(f"ratio_{baseline}", paired_speedup(samples, arm, baseline))
        moved = NAN if entry["bytes_per_token"] is None else float(entry["bytes_per_token"])
        achieved = moved * speed.value
        row |= {"bytes_per_token": moved, "bytes_per_s": achieved, "read_share": achieved / read_bytes_per_s}
        rows.append(row)
    return rows


def _spread(name: str, interval: Interval) -> Row:
    low, high = (interval.low, interval.high) if interval.n > 1 else (NAN, NAN)
    return {name: interval.value, f"{name}_low": low, f"{name}_high": high}


def _refuse_unpaired(arms: Mapping[str, Mapping[str, Any]], where: str) -> None:
    at = named(next(iter(arms.values())))
    if missing := [arm for arm in ARMS if arm not in arms]:
        raise UserError(f"{where}: {at} has no arm {', '.join(missing)}: run the bench again")
    for arm, entry in arms.items():
        bad = [s for s in entry["seconds"] if not (math.isfinite(s) and s > 0)]
        if bad or not entry["seconds"]:
            found = f"a time of {bad[0]} s" if bad else "no time"
            raise UserError(f"{where}: {arm} at {at} has {found}, and a time must be above 0 s: run the bench again")
    for what, count in (("rounds", lambda entry: len(entry["seconds"])), ("tokens", lambda entry: entry["tokens"])):
        counts = {arm: count(entry) for arm, entry in arms.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{arm} {n}" for arm, n in counts.items())
            raise UserError(
                f"{where}: arms at {at} differ in {what} ({listed}), so that rounds do not pair: run the bench again"
            )


def named(row: Mapping[str, Any]) -> str:
    """Name a cell."""
    return f"{row['phase']}, {row['mode']}, batch {row['batch']}, prompt {row['prompt']}"


def arm_labels(bench: Bench) -> dict[str, str]:
    """Return arm -> label."""
    model = VARIANT_LABELS[bench.facts["variant"]].removesuffix(" (+aux)")
    return {
        "baseline_naive": "Baseline, several-op norm",
        "baseline": "Baseline, F.rms_norm",
        "unfused": f"{model} unfused",
        "fused": f"{model} fused",
        "identity": "no norm at all (bound)",
    }
