"""Text on a decoding benchmark: its setting, the modes that it could not measure, and a line per arm."""

import math
from collections.abc import Iterator, Sequence

from ...config.variants import VARIANT_LABELS
from ..frames.decoding import MODES, Bench, Row


def setting(bench: Bench, rows: Sequence[Row]) -> str:
    """Return the sentences on device, software, model and measurement."""
    facts = bench.facts
    decoded = any(row["phase"] == "decode" for row in rows)
    new = f" A round decodes {facts['new_tokens']} new tokens in blocks of {facts['block']}." if decoded else ""
    return (
        f"Measured on {facts['device']}, {facts['dtype']}, {_counted(facts['threads'], 'thread')},"
        f" with PyTorch {facts['torch']} and Python {facts['python']}."
        f" The model is {VARIANT_LABELS[facts['variant']]}, d {facts['d_model']},"
        f" {_counted(facts['n_layer'], 'layer')}, {_counted(facts['n_head'], 'head')},"
        f" vocabulary {facts['vocab_size']:,}.{new}"
        f" Timed: {_counted(rounds(rows), 'round')} after {facts['warmup']} untimed."
    )


def rounds(rows: Sequence[Row]) -> str:
    """Format the number of rounds behind some rows, as a range if it varies."""
    counts = [row["n"] for row in rows]
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low}–{high}"


def unavailable_notes(bench: Bench) -> Iterator[str]:
    """Yield a note for each mode that could not be measured."""
    for mode, reason in bench.unavailable.items():
        yield f"{MODES.get(mode, mode)} was asked for and could not be measured: {reason}."


def _counted(count: int | str, what: str) -> str:
    return f"{count} {what}{'' if str(count) == '1' else 's'}"


def bench_line(row: Row) -> str:
    """Format a measured arm for the terminal: speed, memory traffic, and its share of the read bandwidth."""
    where = f"{row['mode']:<9} {row['phase']:<7} batch {row['batch']:<2} prompt {row['prompt']:<4} {row['arm']:<14}"
    speed = f"{row['tokens_per_s']:>10.1f} tok/s"
    if math.isnan(row["bytes_per_token"]):
        return f"{where} {speed}"
    moved = f"{row['bytes_per_token'] / 1e6:8.2f} MB/token {row['bytes_per_s'] / 1e9:7.2f} GB/s"
    share = "" if math.isnan(row["read_share"]) else f" {100 * row['read_share']:5.1f} % of read bandwidth"
    return f"{where} {speed} {moved}{share}"
