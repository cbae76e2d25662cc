"""What the recipe would do with a model: its norms, what each folds into, and the settings."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from torch import nn

from tapernorm.architectures import architecture_of, vocabulary_of
from tapernorm.checkpoints.stock_form import why_not_stock
from tapernorm.models.decoder import parameter_count
from tapernorm.norms import is_norm
from tapernorm.spread import ScaleSpread
from tapernorm.util.module_names import beginning, in_braces

from ..config.jobs import FinetuneJob
from ..data.hf_tokenizer import save_hub_tokenizer
from ..data.tokenizers import open_tokenizer
from .foresight import Look, NoLook, look_ahead
from .own_text import look_through
from .request import Request, resolve, tapered_of

_MEASURED = ("median", "p99.9", "largest", "first")


def outline(request: Request) -> str:
    """What `taper_model` would do: a table of norms, consumers and parameters, and the settings. Nothing is trained.

    Where weights and text are at hand, also the scales of a few rows at each norm, and where a constant is no match.

    Raises:
        UserError: `taper_model` would refuse the request.
    """
    found = resolve(request, weights=False)
    model, job, hardware = found.outlined, found.job, found.hardware
    tapered = tapered_of(request, model)
    reason = why_not_stock(model, set(tapered))
    with tempfile.TemporaryDirectory() as name:
        save_hub_tokenizer(found.base, Path(name), vocab_size=vocabulary_of(model))
        notes = look_through(request, open_tokenizer(Path(name)), job.context)
    try:
        look = look_ahead(request, found.base, model)
        spreads, told, warnings = look.spreads, _legend(look), look.warnings(tapered, level_weight=request.level_weight)
    except NoLook as error:
        spreads, told, warnings = {}, [f"scales not measured: {error}"], []
    level = f"; level loss {request.level_weight:g}" if request.level_weight else ""
    header = ("norm", "parameters", "becomes", *(_MEASURED if spreads else ()), "folds into")
    return "\n".join(
        [
            *_aligned([header, *_rows(model, tapered, spreads)], numbers=("parameters", *_MEASURED)),
            "",
            *told,
            "",
            f"{type(model).__name__}, {parameter_count(model):,} parameters; {len(tapered)} norms go",
            f"{job.steps} steps of {job.batch} rows of {job.context} tokens, {hardware.micro_batch} at a time, "
            f"{job.train.precision}",
            f"peak learning rate {job.lr:g}; scale loss {job.aux_weight:g}{level}; {_gate(job)}",
            "export: none"
            if request.keep_norms
            else f"export: {found.form}" + (f"; no stock form: {reason}" if reason else ""),
            *(["", *notes] if notes else []),
            *(["", *warnings] if warnings else []),
        ]
    )


def _gate(job: FinetuneJob) -> str:
    if job.taper is None:
        return "every norm stays, as a control"
    return f"the gate falls from step {job.taper.start} to {job.taper.end}"


def _rows(model: nn.Module, tapered: list[str], spreads: Mapping[str, ScaleSpread]) -> Iterator[tuple[str, ...]]:
    arch = architecture_of(model)
    for name, module in model.named_modules():
        if is_norm(module):
            measured = _measured(spreads.get(name), goes=name in tapered) if spreads else ()
            becomes, into = ("linear", _short(name, arch.consumers(name))) if name in tapered else ("kept", "")
            yield name, f"{parameter_count(module):,}", becomes, *measured, into


def _measured(spread: ScaleSpread | None, *, goes: bool) -> tuple[str, ...]:
    """Median scale, and multiples of it, marked where a constant is no match. None: a norm inside attention."""
    if spread is None:
        return ("",) * len(_MEASURED)
    marks = dict.fromkeys(spread.misfits, "!") if goes else {}
    multiples = [("tail", spread.p99_9), ("", spread.largest), ("first", spread.first)]
    return (
        f"{spread.median:.3g}",
        *(f"{value / spread.median:.3g}x{marks.get(where, ' ')}" for where, value in multiples),
    )


def _legend(look: Look) -> list[str]:
    rows, context = look.rows.shape
    return [
        f"median: of the scale that the norm divides a token by, on {rows} rows of {context} tokens, not their first",
        "p99.9, largest, first (median at position 0): multiples of it; !: one constant cannot stand for it",
    ]


def _short(norm: str, consumers: Sequence[str]) -> str:
    """The maps behind a norm without the block's name, and those of one module in one: self_attn.{q,k,v}_proj."""
    block = beginning([norm, *consumers]).rpartition(".")[0]
    local = [consumer.removeprefix(f"{block}.") for consumer in consumers]
    groups = [(parent, list(names)) for parent, names in groupby(local, key=lambda name: name.rpartition(".")[0])]
    return ", ".join(in_braces(names) for _, names in groups)


def _aligned(rows: list[tuple[str, ...]], *, numbers: Sequence[str]) -> list[str]:
    """Columns side by side, those headed by one of `numbers` to the right."""
    columns = [
        [cell.rjust(width) if column[0] in numbers else cell.ljust(width) for cell in column]
        for column in zip(*rows, strict=True)
        for width in [max(map(len, column))]
    ]
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
