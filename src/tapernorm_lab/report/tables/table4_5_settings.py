"""Tables 4 and 5: training length per width, and the GPT-2 schedule. Assumed settings are marked."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tapernorm.schedule import GateSchedule
from tapernorm.util.errors import UserError

from ...config.gpt2 import Gpt2Size
from ...config.jobs import SettingsJob
from ..engine.cells import Cell, number, text
from ..engine.frame import Row
from ..engine.table_spec import Shown, TableSpec
from ..table import ABSENT, Table

MARK = "†"
_COUNT, _PLAIN = ",", "g"
WIDTHS: dict[str, tuple[str, Cell]] = {  # header -> its setting, and its cell
    "size": ("widths.label", text("label")),
    "d": ("widths.d_model", text("d_model")),
    "SwiGLU width": ("widths.d_ff", text("d_ff")),
    "steps": ("widths.steps", number("steps", _COUNT)),
    "tokens": ("widths.steps", number("train_tokens", _COUNT)),
    "LR warm-up": ("train.warmup_fraction", number("warmup_steps", _COUNT)),
    "gate starts": ("taper.start_fraction", number("gate_start", _COUNT)),
    "g = 0 from": ("taper.end_fraction", number("gate_end", _COUNT)),
    "peak LR": ("train.lr", number("lr", _PLAIN)),
    "seeds": ("seeds", text("n_seeds")),
}
SCHEDULE: dict[str, tuple[str, Callable[[Gpt2Size], Any]]] = {  # row -> its setting, and its value
    "optimizer steps": ("gpt2.sizes.steps", lambda s: s.steps),
    "taper start": ("gpt2.sizes.taper", lambda s: s.taper.start),
    "g = 0 from": ("gpt2.sizes.taper", lambda s: s.taper.end),
    "lambda of the scale loss": ("gpt2.sizes.anchor_weight", lambda s: s.anchor_weight),
    "peak LR": ("gpt2.sizes.lr", lambda s: s.lr),
    "least LR": ("gpt2.sizes.min_lr", lambda s: s.min_lr),
    "LR warm-up": ("gpt2.sizes.warmup_steps", lambda s: s.warmup_steps),
    "cosine length": ("gpt2.sizes.decay_steps", lambda s: s.decay_steps),
    "blocks a step": ("gpt2.sizes.batch", lambda s: s.batch),
    "blocks a forward pass": ("gpt2.sizes.micro_batch", lambda s: s.micro_batch),
    "FakeLN: ln_2 start / gap": ("gpt2.sizes.fakeln", lambda s: f"{s.fakeln.mlp_start} / {s.fakeln.mlp_gap}"),
    "FakeLN: ln_1 q,k start / gap": ("gpt2.sizes.fakeln", lambda s: f"{s.fakeln.qk_start} / {s.fakeln.qk_gap}"),
    "FakeLN: ln_1 v start / gap": ("gpt2.sizes.fakeln", lambda s: f"{s.fakeln.v_start} / {s.fakeln.v_gap}"),
    "FakeLN: ln_f": ("gpt2.sizes.fakeln", lambda s: s.fakeln.final),
    "FakeLN: rate of sigma's mean": ("gpt2.sizes.fakeln.ema_rate", lambda s: s.fakeln.ema_rate),
    "FakeLN: lambda of its loss": ("gpt2.sizes.fakeln_weight", lambda s: s.fakeln_weight),
}


def table4(_: None, job: SettingsJob) -> Table:
    """Return Table 4: the training length of each width, and the settings that follow from it."""
    columns = [
        Shown(header + _mark(place, job), cell, align="l" if header == "size" else "r")
        for header, (place, cell) in WIDTHS.items()
    ]
    steps = (
        f"Steps of the optimizer, counted from 0; tokens: steps x batch x context, {job.train.batch} x"
        f" {job.model.context} a step. The gate falls by a cosine between its two steps."
    )
    assumed = _assumed((place for place, _ in WIDTHS.values()), job)
    spec = TableSpec("table4", "Training length per width.", columns, notes=[steps])
    return spec.table(list(_width_records(job)), job, notes=assumed)


def _width_records(job: SettingsJob) -> Iterator[Row]:
    for width in sorted(job.widths, key=lambda w: w.d_model):
        gate = GateSchedule.from_fractions(width.steps, job.taper.start_fraction, job.taper.end_fraction)
        yield {
            "run": job.run,
            "label": width.label,
            "d_model": width.d_model,
            "d_ff": width.d_ff,
            "steps": width.steps,
            "train_tokens": width.steps * job.train.batch * job.model.context,
            "warmup_steps": round(job.train.warmup_fraction * width.steps),
            "gate_start": gate.start,
            "gate_end": gate.end,
            "lr": job.train.lr,
            "n_seeds": len(job.seeds),
            "variants": " ".join(map(str, width.variants)),
            "assumed": " ".join(a.setting for a in job.assumptions if a.setting and a.setting.startswith("widths.")),
        }


def table5(_: None, job: SettingsJob) -> Table:
    """Return Table 5: the schedule of the GPT-2 fine-tunes.

    Raises:
        UserError: the config has no gpt2 section.
    """
    if job.gpt2 is None:
        raise UserError("table5 needs a gpt2 section, and that of this config is null: give another --config")
    sizes = job.gpt2.sizes
    records = [
        {"run": job.run, "setting": place, "name": name, "assumed": bool(_mark(place, job))}
        | {size.name: value(size) for size in sizes}
        for name, (place, value) in SCHEDULE.items()
    ]
    columns = [
        Shown("setting", lambda row: row["name"] + _mark(row["setting"], job), align="l"),
        *(Shown(size.name, lambda row, name=size.name: _shown(row[name])) for size in sizes),
    ]
    steps = "Start, gap and end in optimizer steps, counted from 0."
    assumed = _assumed((place for place, _ in SCHEDULE.values()), job)
    spec = TableSpec("table5", "Schedule of the GPT-2 fine-tunes.", columns, notes=[steps])
    return spec.table(records, job, notes=assumed)


def _mark(place: str, job: SettingsJob) -> str:
    """Return the mark of a setting if it, or its parent, is assumed."""
    return MARK if any(_covers(a.setting, place) for a in job.assumptions) else ""


def _covers(setting: str | None, place: str) -> bool:
    return setting is not None and (place == setting or place.startswith(f"{setting}."))


def _assumed(places: Iterable[str], job: SettingsJob) -> Iterator[str]:
    """Yield the reason for each assumed setting, or a note that there is none."""
    wanted = list(places)
    found = [a for a in job.assumptions if any(_covers(a.setting, place) for place in wanted)]
    if not found:
        yield "No setting here is marked as an assumption in the config."
    for assumption in found:
        yield f"{MARK} assumed: {assumption.setting}: {assumption.reason}."


def _shown(value: Any) -> str:
    if value is None:
        return ABSENT
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
