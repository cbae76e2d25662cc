"""The dry run of a taper: its norms, their scales on a few rows of the text, and its settings.

Rows are cut as in a run: from concatenated documents, so that any token can be at position 0.
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

_LARGEST = 3e9  # parameters; a larger model takes minutes and much memory to load
_CHARACTERS = 16  # read of a document per wanted token: more than the mean of any tokenizer
_UNREAD = "the weights were not read, and a run refuses them if they are damaged or not finite"
_MEASURED = ("median", "p99.9", "largest", "first")


class NotMeasured(UserError):
    """Raised where the scales cannot be measured, or not in seconds, although the request is valid."""


def describe(run: TaperRun) -> str:
    """Return norms, consumers and parameters as a table, followed by the settings.

    If weights and text are on this machine, the table has the scales of a few rows at each norm, and warnings follow.

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
    """Measure the scales of the model on the first rows of the text. Nothing is downloaded or written.

    Raises:
        NotMeasured: weights or text are not on this machine, the model is too large, or the text is too short.
        UserError: weights or text cannot be read.
    """
    if not has_weights(run.base):
        raise NotMeasured("the weights are not downloaded yet")
    if (size := parameter_count(run.skeleton)) > _LARGEST:
        raise NotMeasured(f"the model has {size:,} parameters, and a dry run loads at most {_LARGEST:,.0f}")
    device = take_device(run.hardware.device, run.hardware.threads)
    rows = _first_rows(run, coder)
    return sample_scales(load_pretrained(run.base).to(device), rows, coder)


def _first_rows(run: TaperRun, coder: Coder) -> Tensor:
    """Return the first rows of the text, cut as in a run."""
    few, length = shape_of_sample(parameter_count(run.skeleton), run.job.context)
    ids: list[int] = []
    for text in _documents(run.texts.corpora[HELD_OUT]):
        if text and not text.isspace():
            ids += [*coder.encode(text[: _CHARACTERS * few * length]), coder.eod]
        if len(ids) >= few * length:
            break
    few = min(few, len(ids) // length)
    if few < LEAST:
        raise NotMeasured(f"the text has {len(ids)} tokens, and at least {LEAST} rows of {length} are needed")
    return torch.tensor(ids[: few * length]).view(few, length)


def _documents(texts: Sequence[DataConfig]) -> Iterator[str]:
    """Yield the documents of the texts, in the order given.

    Raises:
        NotMeasured: a text is not on this machine.
    """
    for data in texts:
        if data.source in OWN_SPLIT:
            raise NotMeasured(f"the text {data.source!r} is not downloaded yet")
        if data.field is not None:  # files: open_source would hash them, which takes long for large ones
            for file in find_files(data.files):
                yield from documents_of(file, data.field)
        else:
            yield from (document for _, document in open_source(data).documents())


def _settings(run: TaperRun) -> Iterator[str]:
    job = run.job
    model, norms = type(run.skeleton).__name__, len(run.tapered)
    yield f"{model}, {parameter_count(run.skeleton):,} parameters; {norms} norms to taper"
    rows = f"{job.batch} rows of {job.context} tokens, {run.hardware.micro_batch} at a time"
    yield f"{job.steps} steps of {rows}, {job.train.precision}"
    level = f"; level loss {job.level_weight:g}" if job.level_weight else ""
    yield f"peak learning rate {job.lr:g}; scale loss {job.aux_weight:g}{level}; {_gate(job)}"
    reason = f"; no stock form: {run.not_stock}" if run.not_stock else ""
    yield f"export: {run.forms[0]}{reason}" if run.forms else "export: none"


def _gate(job: TaperJob) -> str:
    if job.taper is None:
        return "control: every norm stays"
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
    """Format the median scale and multiples of it, marked where one constant is no substitute.

    None, for a norm inside attention, gives empty cells.
    """
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
        f"median: scale by which the norm divides a token, on {rows} rows of {context} tokens without position 0",
        "p99.9, largest and first (the median at position 0) are multiples of it; !: one constant cannot replace it",
    ]


def _short(norm: str, consumers: Sequence[str]) -> str:
    """Shorten the names of a norm's linear maps: without the block, and joined as in self_attn.{q,k,v}_proj."""
    block = beginning([norm, *consumers]).rpartition(".")[0]
    local = [consumer.removeprefix(f"{block}.") for consumer in consumers]
    groups = [(parent, list(names)) for parent, names in groupby(local, key=lambda name: name.rpartition(".")[0])]
    return ", ".join(in_braces(names) for _, names in groups)


def _aligned(rows: list[tuple[str, ...]], *, numbers: Sequence[str]) -> list[str]:
    """Align the columns of a table; those with a header in `numbers` to the right."""
    columns = [
        [cell.rjust(width) if column[0] in numbers else cell.ljust(width) for cell in column]
        for column in zip(*rows, strict=True)
        for width in [max(map(len, column))]
    ]
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
