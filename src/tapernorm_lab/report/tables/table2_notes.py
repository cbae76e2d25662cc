"""What the decoding tables and their figure say in words: setting, verdict, notes, and a number with its interval."""

import math
from collections.abc import Iterator, Sequence

from ...config.variants import VARIANT_LABELS
from ..frames.decoding import (
    BASELINES,
    MODES,
    Bench,
    Row,
    arm_labels,
    rounds,
)
from ..table import ABSENT

NAIVE, FUSED_NORM = "ratio_baseline_naive", "ratio_baseline"
_FEW = 6  # below so many rounds even the range of the samples holds the median with less than 95 %
_QUESTIONS = {"eager": "a fused norm (eager)", "compile": "torch.compile", "cudagraph": "CUDA graphs"}


def verdict(bench: Bench) -> str:
    """One sentence: does the fused model's gain survive a fused norm, compile and CUDA graphs."""
    answers = []
    for mode, name in _QUESTIONS.items():
        if rows := bench.where(phase="decode", mode=mode, arm="fused"):
            answers.append(f"{name}: {_survival(rows)}")
        else:
            answers.append(f"{name}: not measured ({bench.unavailable.get(mode, 'not asked for')})")
    model = arm_labels(bench)["fused"]
    return f"Does the decoding gain of {model} survive? Against Baseline with F.rms_norm, {'; '.join(answers)}."


def _survival(rows: Sequence[Row]) -> str:
    gains = sum(all(row[f"ratio_{b}_low"] > 1 for b in BASELINES) for row in rows)
    losses = sum(any(row[f"ratio_{b}_high"] < 1 for b in BASELINES) for row in rows)
    answer = "yes" if gains == len(rows) else "in part" if gains else "no" if losses else "not shown"
    if all(row["n"] == 1 for row in rows):
        answer = "one round cannot tell"
    low, high = (f"{f(row[FUSED_NORM] for row in rows):.3f}" for f in (min, max))
    span = low if low == high else f"{low}–{high}"
    slower = f", a loss in {losses}" if losses else ""
    return f"{answer} ({span}x, a gain in {gains} of {len(rows)}{slower})"


def setting(bench: Bench, rows: Sequence[Row]) -> str:
    """Device, software, model and measurement in words."""
    facts = bench.facts
    decoded = any(row["phase"] == "decode" for row in rows)
    new = f"{facts['new_tokens']} new tokens in blocks of {facts['block']}, " if decoded else ""
    return (
        f"{facts['device']}, {facts['dtype']}, {_counted(facts['threads'], 'thread')};"
        f" PyTorch {facts['torch']}, Python {facts['python']};"
        f" {VARIANT_LABELS[facts['variant']]}, d {facts['d_model']}, {_counted(facts['n_layer'], 'layer')},"
        f" {_counted(facts['n_head'], 'head')}, vocabulary {facts['vocab_size']:,};"
        f" {new}{_counted(rounds(rows), 'round')} after {facts['warmup']} untimed."
    )


def reading_notes(rows: Sequence[Row], speed: str = "tok/s: tokens per second") -> Iterator[str]:
    """How to read speeds and ratios."""
    yield (
        f"{speed}, all sequences of the batch together, median over n = {rounds(rows)} rounds; ratio: median over the"
        " rounds of the Baseline's time over the row's, paired by round; in brackets, 95 % bootstrap intervals."
    )
    if min(row["n"] for row in rows) < _FEW:
        yield f"With fewer than {_FEW} rounds the intervals are narrower than 95 % would need."


def bandwidth_notes(bench: Bench, rows: Sequence[Row]) -> Iterator[str]:
    """How to read bytes/s and their share of what the device can read."""
    needed = "GB/s: the bytes of weights and cache that a decoded token must read, times tok/s"
    if bench.read_bandwidth is None:
        yield f"{needed}; the device's read bandwidth was not measured."
        return
    read = bench.read_bandwidth
    limit = interval(1e-9 * read.value, 1e-9 * read.low, 1e-9 * read.high, 1)
    yield (
        f"{needed}; % of read: its share of the device's read bandwidth, {limit} GB/s, measured by a reduction over a"
        f" large buffer, n = {read.n}."
    )
    if any(row["read_share"] > 1 for row in rows):
        yield "A share above 100 % means that weights were read from a cache of the device, not from its memory."


def run_notes(bench: Bench) -> Iterator[str]:
    """What was checked, which modes were missing, the state of the machine, and the code."""
    labels, facts = arm_labels(bench), bench.facts
    checks = [
        f"{labels.get(arm, arm)} {check['largest_logit_difference']:.1e} (logits' RMS {check['logit_scale']:.3g})"
        for arm, check in bench.checks.items()
    ]
    if checks:
        yield f"Largest difference from the gated model's logits at g = 0, before timing: {'; '.join(checks)}."
    yield from unavailable_notes(bench)
    tf32 = {True: "TF32 on", False: "TF32 off"}.get(facts["tf32"], "No TF32")
    clocks = "".join(f", {name} {value}" for name, value in bench.clocks.items())
    before, after = (ABSENT if facts[key] is None else f"{facts[key]:.2f}" for key in ("load_before", "load_after"))
    commit = facts["commit"] or "unknown"
    short = commit[:12] + ("+dirty" if commit.endswith("+dirty") else "")
    yield f"{tf32}{clocks}; load {before} before, {after} after. Code commit: {short}."


def fixed_notes(rows: Sequence[Row]) -> Iterator[str]:
    """What a fixed graph costs, where one was measured."""
    if any(row["mode"] != "eager" for row in rows):
        yield (
            "torch.compile and CUDA graphs keep one graph for all positions: each step attends over the whole cache, as"
            " long as the longest prompt and its new tokens, so the prompt hardly changes their speed."
        )


def unavailable_notes(bench: Bench) -> Iterator[str]:
    """Modes that were asked for and could not be measured."""
    for mode, reason in bench.unavailable.items():
        yield f"{MODES.get(mode, mode)} was asked for and could not be measured: {reason}."


def spread(row: Row, name: str, *, scale: float = 1.0) -> str:
    """A value to four significant digits with its interval; the value alone where it has none."""
    value, low, high = (scale * row[column] for column in (name, f"{name}_low", f"{name}_high"))
    return interval(value, low, high, decimals(value))


def ratio(row: Row, name: str) -> str:
    """A ratio with its interval; none for the baseline itself."""
    if name == f"ratio_{row['arm']}" or math.isnan(row[name]):
        return ABSENT
    return interval(row[name], row[f"{name}_low"], row[f"{name}_high"], 3)


def interval(value: float, low: float, high: float, digits: int) -> str:
    between = "" if math.isnan(low) else f" [{low:,.{digits}f}, {high:,.{digits}f}]"
    return f"{value:,.{digits}f}{between}"


def number(value: float, form: str) -> str:
    return ABSENT if math.isnan(value) else format(value, form)


def decimals(value: float, significant: int = 4) -> int:
    """How many decimals print `value` to so many significant digits; none above that."""
    return max(0, significant - 1 - math.floor(math.log10(value)))


def _counted(count: int | str, what: str) -> str:
    return f"{count} {what}{'' if str(count) == '1' else 's'}"


def bench_line(row: Row) -> str:
    """One measured arm for the terminal: speed, and what it moves of what the memory can."""
    where = f"{row['mode']:<9} {row['phase']:<7} batch {row['batch']:<2} prompt {row['prompt']:<4} {row['arm']:<14}"
    speed = f"{row['tokens_per_s']:>10.1f} tok/s"
    if math.isnan(row["bytes_per_token"]):
        return f"{where} {speed}"
    moved = f"{row['bytes_per_token'] / 1e6:8.2f} MB/token {row['bytes_per_s'] / 1e9:7.2f} GB/s"
    share = "" if math.isnan(row["read_share"]) else f" {100 * row['read_share']:5.1f} % of read bandwidth"
    return f"{where} {speed} {moved}{share}"
