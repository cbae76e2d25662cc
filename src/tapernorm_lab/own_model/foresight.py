"""What a taper of the user's model will meet, seen before anything is trained: its scales on the user's own text.

The rows are cut as the recipe cuts them, documents end to end, so that a first position is any token.
"""

import shlex
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tapernorm.architectures import vocabulary_of
from tapernorm.checkpoints.pretrained import load_pretrained
from tapernorm.models.decoder import parameter_count
from tapernorm.spread import (
    FIRST_LIMIT,
    TAIL_LIMIT,
    ScaleSpread,
    measure,
)
from tapernorm.util.errors import UserError
from tapernorm.util.module_names import of_blocks, patterns

from ..config.sections import OWN_SPLIT
from ..data.hf_tokenizer import save_hub_tokenizer
from ..data.sources import open_source
from ..data.text_files import documents_of, find_files
from ..data.tokenizers import Coder, open_tokenizer, piece_of
from ..training.device import take_device
from .options import HELD_OUT, check
from .request import (
    Request,
    hardware_of,
    has_weights,
    job_of,
)

_OPERATIONS = 3e11  # of one look, about: seconds on two cores
_FEWEST, _MOST = 256, 8192  # tokens of one look
_ROW = 128  # tokens
LEVEL = 0.2  # that levelled a model of massive activations
_LEAST = 2  # rows
_BATCH = 8  # rows per forward pass
_NAMED = 3  # tokens
_LARGEST = 3e9  # parameters: what is larger takes minutes to load, and more memory than one may mean to spend
_CHARACTERS = 16  # of a document, per token wanted: more than any tokenizer joins on average


class NoLook(UserError):
    """The scales cannot be measured yet, or not quickly; nothing is wrong with the request."""


@dataclass(frozen=True)
class Look:
    """The scales at every norm of a model on a few rows of text."""

    spreads: dict[str, ScaleSpread]  # by norm, in the order they run
    rows: Tensor  # (R, T) ids
    coder: Coder

    def warnings(self, tapered: Collection[str], *, level_weight: float) -> list[str]:
        """What to tell of the norms that go and that one constant cannot stand for, and what there is against it.

        No lines where there are none.

        Args:
            level_weight: what the user chose for `--level`.
        """
        unfit = {name: self.spreads[name] for name in tapered if self.spreads[name].misfits}
        if not unfit:
            return []
        first = {name: spread for name, spread in unfit.items() if "first" in spread.misfits}
        tail = {name: spread for name, spread in unfit.items() if "tail" in spread.misfits}
        lines = [f"{len(unfit)} of the {len(tapered)} norms that go meet tokens that one constant cannot stand for:"]
        if first:
            most = max(spread.first / spread.median for spread in first.values())
            told = f"position 0 has over {FIRST_LIMIT:g} times the median scale (up to {most:.3g})"
            lines.append(f"  {told}: {', '.join(of_blocks(first))}")
        if tail:
            most = max(spread.p99_9 / spread.median for spread in tail.values())
            told = f"later positions have over {TAIL_LIMIT:g} times the median scale at p99.9 (up to {most:.3g})"
            lines.append(f"  {told}: {', '.join(of_blocks(tail))}")
            lines.append(f"  the largest of these, in medians: {', '.join(self._largest(tail.values()))}")
        chosen = " (chosen)" if level_weight else ""
        level = f"--level {level_weight or LEVEL:g} levels these scales while the norms still work{chosen}"
        return [*lines, f"  {level}", *self._others(tapered, unfit)]

    def _others(self, tapered: Collection[str], unfit: Collection[str]) -> list[str]:
        """The option that tapers the other norms alone."""
        *internal, final = self.spreads
        others = patterns([name for name in tapered if name not in unfit and name != final], internal)
        if not others:
            return []
        without = " without --final" if final in unfit else ""
        return [f"  --sites {' '.join(map(shlex.quote, others))}{without} tapers the other norms alone"]

    def _largest(self, spreads: Collection[ScaleSpread]) -> list[str]:
        """The tokens with the largest multiples of their norm's median, each once."""
        times = [(outlier.scale / spread.median, outlier) for spread in spreads for outlier in spread.worst]
        found: dict[str, str] = {}
        for factor, outlier in sorted(times, key=lambda pair: -pair[0]):
            piece = piece_of(self.coder, self.rows[outlier.row].tolist(), outlier.position)
            found.setdefault(piece, f"{piece!r} at position {outlier.position} ({factor:.3g})")
        return list(found.values())[:_NAMED]


def look_ahead(request: Request, base: Path, outlined: nn.Module) -> Look:
    """The scales of the model in `base` on the first rows of the user's text; nothing is downloaded or written.

    Args:
        outlined: the model without weights.

    Raises:
        NoLook: weights or text are not here yet, the model is too large for a look, or the text too short for one.
        UserError: weights, tokenizer or text cannot be read.
    """
    if not has_weights(base):
        raise NoLook("the weights are not here yet")
    if (size := parameter_count(outlined)) > _LARGEST:
        raise NoLook(f"{size:,} parameters are too many for a quick look, which takes up to {_LARGEST:,.0f}")
    hardware = hardware_of(request, outlined)
    device = take_device(hardware.device, hardware.threads)
    with tempfile.TemporaryDirectory() as name:
        save_hub_tokenizer(base, Path(name), vocab_size=vocabulary_of(outlined))
        coder = open_tokenizer(Path(name))
    rows = _rows(request, outlined, coder)
    model = load_pretrained(base).to(device)
    return look_at(model, rows, coder)


def look_at(model: nn.Module, rows: Tensor, coder: Coder) -> Look:
    """The scales of a model on a few of the rows (R, T) that it is about to be trained on."""
    few, length = _shape(parameter_count(model), rows.shape[1])
    some = rows[:few, :length]
    return Look(measure(model, some, batch=min(len(some), _BATCH)), some, coder)


def _shape(parameters: int, context: int) -> tuple[int, int]:
    """Rows and tokens of a row that a look at so many parameters takes."""
    length = min(context, _ROW)
    tokens = min(max(_OPERATIONS / 2 / parameters, _FEWEST), _MOST)
    return max(_LEAST, int(tokens / length)), length


def _rows(request: Request, outlined: nn.Module, coder: Coder) -> Tensor:
    """The first rows of the text, end to end, as the recipe cuts them."""
    few, length = _shape(parameter_count(outlined), job_of(request, outlined).context)
    ids: list[int] = []
    for text in _documents(request):
        if text and not text.isspace():
            ids += [*coder.encode(text[: _CHARACTERS * few * length]), coder.eod]
        if len(ids) >= few * length:
            break
    few = min(few, len(ids) // length)
    if few < _LEAST:
        raise NoLook(f"the text has {len(ids)} tokens, and {_LEAST} rows of {length} are the least")
    return torch.tensor(ids[: few * length]).view(few, length)


def _documents(request: Request) -> Iterator[str]:
    """The texts in the order given, as far as they lie here."""
    for data in check(request).corpora[HELD_OUT]:
        if data.source in OWN_SPLIT:
            raise NoLook(f"the text {data.source!r} would have to be downloaded first")
        if data.source == "text":  # open_source would hash the files, whatever their size
            for file in find_files(data.files):
                yield from documents_of(file, request.field)
        else:
            yield from (document for _, document in open_source(data).documents())
