"""A plan in words: one line per rule, the totals, and what the defaults are expected to save."""

from collections.abc import Iterator, Sequence

from .device_speeds import COMPILED, FLOAT32
from .run import Config
from .run_cost import Item, Plan, expected_seconds

_HEADER = ("rule", "jobs", "tokens", "FLOPs", "disk", "GPU-hours", "published")


def plan_text(config: Config, plan: Plan, *, cores: int) -> str:
    """The plan of `config`, for a terminal."""
    return "\n".join([f"{config.run}: {config.caption}", "", *_table(plan), "", *_totals(config, plan, cores)])


def _table(plan: Plan) -> Iterator[str]:
    rows = [_HEADER, *(_cells(plan, item) for item in plan.items)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def _cells(plan: Plan, item: Item) -> Sequence[str]:
    hours = plan.item_hours(item)
    return (
        item.rule,
        str(item.jobs),
        _count(item.tokens),
        f"{item.flops:.1e}" if item.flops else "",
        _size(item.disk_bytes),
        f"{hours:.1f}" if plan.on_gpu and hours >= 0.05 else "",
        "" if item.published_h is None else f"{item.published_h:.1f}",
    )


def _totals(config: Config, plan: Plan, cores: int) -> Iterator[str]:
    running = max(plan.items, key=plan.running_bytes)
    yield f"{sum(item.jobs for item in plan.items):,} jobs, {sum(item.flops for item in plan.items):.1e} FLOPs."
    yield (
        f"Disk: {_size(plan.peak_bytes)} at the peak, of it {_size(plan.running_bytes(running))} checkpoints of"
        f" running jobs ({running.rule} the largest), deleted as each succeeds; caches of downloads come on top."
    )
    if not plan.on_gpu:
        yield f"Expected on {cores} CPU cores: {expected_seconds(config, cores):.0f} s."
        return
    published = sum(item.published_h or 0 for item in plan.items)
    theirs = sum(plan.item_hours(item, compiled=False, shared=1) for item in plan.items if item.published_h)
    yield f"GPU-hours: {plan.device_hours():.0f}, so {plan.device_hours() / plan.gpus:.0f} h on {plan.gpus} GPU(s)."
    if plan.largest.devices > plan.gpus:
        largest = plan.largest
        yield f"A job of {largest.rule} takes {largest.devices} GPUs of one machine: {plan.gpus} cannot run it."
    if published:
        yield (
            f"Published: {published:.0f} h for as many runs as those with a number beside them, eager, one per H100; by"
            f" the same arithmetic without our defaults: {theirs:.0f} h, its overhead having been fitted to theirs."
        )
    yield from _assumed(plan)
    yield from _savings(plan)


def _assumed(plan: Plan) -> Iterator[str]:
    decoder, gpt2 = plan.speeds.decoder, plan.speeds.gpt2
    yield (
        f"Counted on: {decoder.step_s:g} s of overhead per forward and backward pass, {decoder.flops_per_s:.0e} FLOP/s"
        f" (GPT-2: {gpt2.flops_per_s:.0e}). Measured numbers go in by --step-s, --flops-per-s, or --rows of finished"
        " runs."
    )
    if plan.measured:
        named = ", ".join(f"d {d}: {speed:,.0f} tokens/s" for d, speed in sorted(plan.measured.items()))
        yield f"Measured: {named}, compilation and sharing as those runs had them."


def _savings(plan: Plan) -> Iterator[str]:
    """Hours without each default of the hardware section; expected, not measured."""
    hardware, now = plan.hardware, plan.device_hours()
    if hardware.compile:
        without = plan.device_hours(compiled=False)
        yield f"compile: {without:.0f} GPU-hours without it (expected to leave {COMPILED:g} of a step's overhead)."
    if hardware.jobs_per_gpu > 1:
        yield (
            f"jobs_per_gpu {hardware.jobs_per_gpu}: {plan.device_hours(shared=1):.0f} GPU-hours with one job per GPU;"
            " overheads of pre-training jobs that share a device overlap, their arithmetic does not. A scheduler that"
            " gives each job a GPU of its own shares none: there, count on the larger number."
        )
    if plan.precision == "bf16":
        slow = plan.device_hours(slowed=1 / FLOAT32)
        yield f"bf16: {slow:.0f} GPU-hours in float32 (expected to take {1 / FLOAT32:g} times as long per product)."
    if not hardware.compile or hardware.jobs_per_gpu == 1:
        best = plan.device_hours(compiled=True, shared=max(4, hardware.jobs_per_gpu))
        yield f"With compile and four jobs per GPU: {best:.0f} in place of {now:.0f} GPU-hours."


def _count(number: float) -> str:
    """With three digits and a letter for thousands, millions, ..."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}" if number else ""


def _size(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 1e3:.0f} kB" if size else ""
