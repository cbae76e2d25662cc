"""Tables 4 and 5, steps per width and the GPT-2 schedule, written from the config; what is assumed is marked."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tapernorm.schedule import GateSchedule
from tapernorm.util.errors import UserError

from ...config.gpt2 import Gpt2Size
from ...config.jobs import SettingsJob
from ...config.sections import WidthConfig
from ..table import ABSENT, Column, Table

MARK = "†"

Row = dict[str, Any]


def table4(_: None, job: SettingsJob) -> Table:
    """Table 4: the training length of each width, and what follows from it."""
    records = [_width_record(job, width) for width in sorted(job.widths, key=lambda w: w.d_model)]
    places = {
        "size": "widths.label",
        "d": "widths.d_model",
        "SwiGLU width": "widths.d_ff",
        "steps": "widths.steps",
        "tokens": "widths.steps",
        "LR warm-up": "train.warmup_fraction",
        "gate starts": "taper.start_fraction",
        "g = 0 from": "taper.end_fraction",
        "peak LR": "train.lr",
        "seeds": "seeds",
    }
    return Table(
        name="table4",
        columns=_columns(places, job),
        rows=[
            [
                *(row["label"], str(row["d_model"]), str(row["d_ff"]), f"{row['steps']:,}", f"{row['train_tokens']:,}"),
                *(f"{row[key]:,}" for key in ("warmup_steps", "gate_start", "gate_end")),
                *(f"{row['lr']:g}", str(row["n_seeds"])),
            ]
            for row in records
        ],
        published=[],
        caption=f"Training length per width. Run {job.run}: {job.caption}",
        notes=[
            "Steps of the optimizer, counted from 0; tokens: steps x batch x context, "
            f"{job.train.batch} x {job.model.context} a step. The gate falls by a cosine between its two steps.",
            *_assumed(places.values(), job),
        ],
        records=records,
    )


def table5(_: None, job: SettingsJob) -> Table:
    """Table 5: the schedule of the GPT-2 fine-tunes.

    Raises:
        UserError: the config has no GPT-2 track.
    """
    if job.gpt2 is None:
        raise UserError("this config has no GPT-2 track, so that there is no Table 5: its `gpt2` is null")
    sizes = job.gpt2.sizes
    entries: dict[str, tuple[str, Callable[[Gpt2Size], Any]]] = {  # row -> its setting, and its value
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
    places = [place for place, _ in entries.values()]
    return Table(
        name="table5",
        columns=[Column("setting", align="l"), *(Column(size.name) for size in sizes)],
        rows=[
            [name + _mark(place, job), *(_shown(value(size)) for size in sizes)]
            for name, (place, value) in entries.items()
        ],
        published=[],
        caption=f"Schedule of the GPT-2 fine-tunes. Run {job.run}: {job.caption}",
        notes=["Start, gap and end in optimizer steps, counted from 0.", *_assumed(places, job)],
        records=[
            {"run": job.run, "setting": place, "name": name, "assumed": bool(_mark(place, job))}
            | {size.name: value(size) for size in sizes}
            for name, (place, value) in entries.items()
        ],
    )


def _width_record(job: SettingsJob, width: WidthConfig) -> Row:
    gate = GateSchedule.from_fractions(width.steps, job.taper.start_fraction, job.taper.end_fraction)
    return {
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
        "variants": " ".join(width.variants),
        "assumed": " ".join(a.setting for a in job.assumptions if a.setting and a.setting.startswith("widths.")),
    }


def _columns(places: dict[str, str], job: SettingsJob) -> list[Column]:
    named = [header + _mark(place, job) for header, place in places.items()]
    return [Column(header, align="r" if i else "l") for i, header in enumerate(named)]


def _mark(place: str, job: SettingsJob) -> str:
    """The mark of an assumed setting; one whose parent is assumed is assumed too."""
    return MARK if any(_covers(a.setting, place) for a in job.assumptions) else ""


def _covers(setting: str | None, place: str) -> bool:
    return setting is not None and (place == setting or place.startswith(f"{setting}."))


def _assumed(places: Iterable[str], job: SettingsJob) -> Iterator[str]:
    """Why each marked setting is assumed, or that nothing is."""
    wanted = list(dict.fromkeys(places))
    found = [a for a in job.assumptions if any(_covers(a.setting, place) for place in wanted)]
    if not found:
        yield "No setting here is marked as an assumption in the config."
    for assumption in found:
        yield f"{MARK} assumed: {assumption.setting}: {assumption.reason}."


def _shown(value: Any) -> str:
    if value is None:
        return ABSENT
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
