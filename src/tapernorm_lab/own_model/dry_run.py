"""What a taper would do: its norms, their scales on a few rows of the text, its settings. Nothing is trained.

The rows are cut as a run cuts them, documents end to end, so that a first position is any token.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from tapernorm.architectures import architecture_of, vocabulary_of
from tapernorm.checkpoints.pretrained import load_pretrained
from tapernorm.models.decoder import parameter_count
from tapernorm.norms import is_norm
from tapernorm.spread import ScaleSpread
from tapernorm.util.errors import UserError
from tapernorm.util.module_names import beginning, in_braces

from ..config.sections import OWN_SPLIT, DataConfig
from ..data.hf_tokenizer import save_hub_tokenizer
from ..data.sources import open_source
from ..data.text_files import documents_of, find_files
from ..data.tokenizers import Coder, open_tokenizer
from ..training.device import take_device
from .job import TaperJob
from .options import HELD_OUT
from .own_text import check_texts
from .resolve import TaperRun, has_weights
from .scale_warnings import LEAST, ScaleSample, sample_scales, shape_of_sample

_LARGEST = 3e9  # parameters: what is larger takes minutes to load, and more memory than one may mean to spend
_CHARACTERS = 16  # of a document, per token wanted: more than any tokenizer joins on average
_UNREAD = "the weights were not read: a run refuses them where they are damaged or not finite"
_MEASURED = ("median", "p99.9", "largest", "first")


class NotMeasured(UserError):
    """The scales cannot be measured yet, or not quickly; nothing is wrong with the request."""


def describe(run: TaperRun) -> str:
    """Norms, consumers and parameters as a table, and the settings.

    Where weights and text are at hand, also the scales of a few rows at each norm, and where a constant is no match.

    Raises:
        UserError: `taper_model` would refuse the run.
    """
    with tempfile.TemporaryDirectory() as name:
        save_hub_tokenizer(run.base, Path(name), vocab_size=vocabulary_of(run.skeleton))
        coder = open_tokenizer(Path(name))
    notes = check_texts(run.texts, coder, run.job.context)
    try:
        sample = scales_ahead(run, coder)
        spreads, told = sample.spreads, _legend(sample)
        warnings = sample.warnings(run.tapered, level_weight=run.job.level_weight)
    except NotMeasured as error:
        spreads, told, warnings = {}, [f"scales not measured: {error}", _UNREAD], []
    header = ("norm", "parameters", "becomes", *(_MEASURED if spreads else ()), "folds into")
    return "\n".join(
        [
            *_aligned([header, *_rows(run, spreads)], numbers=("parameters", *_MEASURED)),
            "",
            *told,
            "",
            *_settings(run),
            *(["", *notes] if notes else []),
            *(["", *warnings] if warnings else []),
        ]
    )


def scales_ahead(run: TaperRun, coder: Coder) -> ScaleSample:
    """The scales of the model on the first rows of the text; nothing is downloaded or written.

    Raises:
        NotMeasured: weights or text are not here yet, the model is too large, or the text too short for one.
        UserError: weights or text cannot be read.
    """
    if not has_weights(run.base):
        raise NotMeasured("the weights are not here yet")
    if (size := parameter_count(run.skeleton)) > _LARGEST:
        raise NotMeasured(f"{size:,} parameters are too many for a dry run, which takes up to {_LARGEST:,.0f}")
    device = take_device(run.hardware.device, run.hardware.threads)
    rows = _first_rows(run, coder)
    return sample_scales(load_pretrained(run.base).to(device), rows, coder)


def _first_rows(run: TaperRun, coder: Coder) -> Tensor:
    """The first rows of the text, end to end, as a run cuts them."""
    few, length = shape_of_sample(parameter_count(run.skeleton), run.job.context)
    ids: list[int] = []
    for text in _documents(run.texts.corpora[HELD_OUT]):
        if text and not text.isspace():
            ids += [*coder.encode(text[: _CHARACTERS * few * length]), coder.eod]
        if len(ids) >= few * length:
            break
    few = min(few, len(ids) // length)
    if few < LEAST:
        raise NotMeasured(f"the text has {len(ids)} tokens, and {LEAST} rows of {length} are the least")
    return torch.tensor(ids[: few * length]).view(few, length)


def _documents(texts: Sequence[DataConfig]) -> Iterator[str]:
    """The texts in the order given, as far as they lie here."""
    for data in texts:
        if data.source in OWN_SPLIT:
            raise NotMeasured(f"the text {data.source!r} would have to be downloaded first")
        if data.field is not None:  # a text of files: open_source would hash them, whatever their size
            for file in find_files(data.files):
                yield from documents_of(file, data.field)
        else:
            yield from (document for _, document in open_source(data).documents())


def _settings(run: TaperRun) -> Iterator[str]:
    job = run.job
    yield f"{type(run.skeleton).__name__}, {parameter_count(run.skeleton):,} parameters; {len(run.tapered)} norms go"
    rows = f"{job.batch} rows of {job.context} tokens, {run.hardware.micro_batch} at a time"
    yield f"{job.steps} steps of {rows}, {job.train.precision}"
    level = f"; level loss {job.level_weight:g}" if job.level_weight else ""
    yield f"peak learning rate {job.lr:g}; scale loss {job.aux_weight:g}{level}; {_gate(job)}"
    reason = f"; no stock form: {run.not_stock}" if run.not_stock else ""
    yield f"export: {run.forms[0]}{reason}" if run.forms else "export: none"


def _gate(job: TaperJob) -> str:
    if job.taper is None:
        return "every norm stays, as a control"
    return f"the gate falls from step {job.taper.start} to {job.taper.end}"


def _rows(run: TaperRun, spreads: Mapping[str, ScaleSpread]) -> Iterator[tuple[str, ...]]:
    arch = architecture_of(run.skeleton)
    for name, module in run.skeleton.named_modules():
        if is_norm(module):
            goes = name in run.tapered
            measured = _measured(spreads.get(name), goes=goes) if spreads else ()
            becomes, into = ("linear", _short(name, arch.consumers(name))) if goes else ("kept", "")
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


def _legend(sample: ScaleSample) -> list[str]:
    rows, context = sample.rows.shape
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
