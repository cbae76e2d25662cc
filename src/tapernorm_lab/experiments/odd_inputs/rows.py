"""The rows of ids that finished models are scored on, for Tables S3 and S2.

n rows, T tokens that a model reads, V vocabulary. A row holds T + 1 ids: the model reads the first T, and predicts the
next id at each position 0 ... T - 1. Rows are the same for every model. Table S3 reports parts of them by position.

held_out    text of the run's own validation split, in windows of the training context: the reference
texts       another kind of text, encoded with the run's own tokenizer
rare        held-out rows with one of the training text's rarest tokens repeated, from a quarter of the row on
never_seen  the same with a token that the training text lacks
longer      held-out rows longer than the training context, reported by position
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapernorm.util.errors import UserError
from tapernorm.util.rng import generator

from ...config.odd_inputs import HELD_OUT, LONGER, NEVER_SEEN, RARE, RobustnessJob
from ...data.blocks import Blocks
from ...data.manifest import origin_of
from ...data.token_stream import TokenStream
from ...data.tokenizers import Coder

OWN_TEXT = "validation split of the run"
FEW_ROWS = 16  # rows of each kind for Table S2
LONGER_TIMES = 4  # length of Table S2's longer rows, in contexts
_CHUNK = 1 << 22  # ids that are counted at once


@dataclass(frozen=True)
class Part:
    """A range of positions in the rows of an odd input."""

    name: str
    label: str
    first: int  # positions first ... last - 1
    last: int


@dataclass(frozen=True)
class OddInput:
    """The rows of one odd input, which every model reads."""

    name: str
    label: str
    rows: Tensor  # (n, T+1) int64
    parts: tuple[Part, ...]
    origin: str

    def facts(self) -> dict[str, Any]:
        """Return the entry of a result; its hash shows whether two runs read the same ids."""
        return {
            "label": self.label,
            "rows": len(self.rows),
            "rows_sha256": hashlib.sha256(self.rows.contiguous().numpy().tobytes()).hexdigest(),
            "origin": self.origin,
            "parts": {part.name: {"label": part.label, "first": part.first, "last": part.last} for part in self.parts},
        }


def odd_inputs(job: RobustnessJob, coder: Coder, tokens: Path, texts: Mapping[str, Path]) -> list[OddInput]:
    """Return all odd inputs of `job`.

    Args:
        job: the models and the settings of the odd inputs.
        coder: the models' tokenizer.
        tokens: token streams that the models were trained on.
        texts: name -> blocks of the text; the names are those of the job.

    Raises:
        UserError: the streams or a text have another tokenizer or row length, or are too short for a row.
    """
    odd, context = job.robustness, job.context
    train, valid = (TokenStream.open(tokens, split) for split in ("train", "valid"))
    _require_tokenizer(train.manifest, tokens, coder)
    if len(valid.tokens) <= (longest := odd.lengths[-1]):
        raise UserError(
            f"the validation split in {tokens} has {len(valid.tokens)} tokens, and one row of robustness.lengths takes "
            f"{longest + 1}: lower them, or raise data.valid_fraction"
        )
    own, longer = (text_rows(valid.tokens, length, seed=odd.seed, limit=odd.max_rows) for length in (context, longest))
    whole = Part("all", "all positions", 0, context)
    # What follows the repeats of `_repeated`, where there are none: they cut off the last ids of a row.
    plain = Part("unrepeated", "text that follows no repeats", job.place - 1, context - odd.repeat)
    beyond = (
        Part(f"to_{last}", f"positions {first}–{last - 1}", first, last)
        for first, last in pairwise((0, context, *odd.lengths))
    )
    return [
        OddInput(HELD_OUT, "held-out text", own, (whole, plain), OWN_TEXT),
        *(_foreign(job, coder, name, folder, whole) for name, folder in texts.items()),
        *_repeated(job, own, token_counts(train.tokens, coder.vocab_size), barred=coder.eod),
        OddInput(LONGER, "beyond the training context", longer, tuple(beyond), OWN_TEXT),
    ]


def _foreign(job: RobustnessJob, coder: Coder, name: str, folder: Path, whole: Part) -> OddInput:
    blocks = Blocks.open(folder, "valid")
    _require_tokenizer(blocks.manifest, folder, coder)
    if (length := blocks.rows.shape[1]) != job.context + 1:
        raise UserError(
            f"rows in {folder} have {length} tokens, and models of context {job.context} are tried on rows of "
            f"{job.context + 1}: cut them again"
        )
    rows = blocks.rows.to(torch.int64)
    return OddInput(name, job.robustness.text(name).label, rows, (whole,), origin_of(blocks.manifest))


def _repeated(job: RobustnessJob, own: Tensor, counts: Tensor, *, barred: int) -> Iterator[OddInput]:
    """Yield the rows with repeats; no `never_seen` rows if the training text has every token.

    `barred` is the end-of-document id.
    """
    odd, start = job.robustness, job.place
    end = start + odd.repeat
    parts = (
        Part("repeats", "the repeats", start - 1, end - 1),
        Part("after", "text that follows them", end - 1, job.context),
    )
    groups = {
        RARE: ("rare token repeated", rarest(counts, odd.rare_tokens, barred=barred)),
        NEVER_SEEN: ("never seen token repeated", never_seen(counts)),
    }
    for name, (label, ids) in groups.items():
        if len(ids):
            rows = with_repeats(own, ids, place=start, times=odd.repeat, seed=odd.seed, stream=f"repeats/{name}")
            low, high = int(counts[ids].min()), int(counts[ids].max())
            often = f"has {low} to {high} times" if high else "never has"
            which = f"one of {len(ids)} tokens that the training text {often}"
            yield OddInput(name, label, rows, parts, f"{OWN_TEXT}; {which}, {odd.repeat} times from token {start} on")


def _require_tokenizer(manifest: Mapping[str, Any], folder: Path, coder: Coder) -> None:
    found, wanted = manifest["tokenizer_sha256"], coder.manifest["sha256"]
    if found != wanted:
        raise UserError(
            f"{folder} was written with another tokenizer than the one given (sha256 {found[:12]} and {wanted[:12]}): "
            "write it again with that one"
        )


def few_odd_rows(tokens: Tensor, *, vocabulary: int, context: int) -> dict[str, Tensor]:
    """Return rows of ids (n, T+1) by kind: `text`, `longer` text, the `same` token repeated, and `random` ids.

    There are 16 rows of each kind, or fewer of text if it is short. There are no `longer` rows if it is too short.
    """
    random = generator(0, "oddities")
    made = {
        "text": text_rows(tokens, context, seed=0, limit=FEW_ROWS),
        "same": torch.randint(vocabulary, (FEW_ROWS, 1), generator=random).expand(-1, context + 1),
        "random": torch.randint(vocabulary, (FEW_ROWS, context + 1), generator=random),
    }
    if len(tokens) > LONGER_TIMES * context:
        made["longer"] = text_rows(tokens, LONGER_TIMES * context, seed=0, limit=FEW_ROWS)
    return made


def text_rows(tokens: Tensor, context: int, *, seed: int, limit: int) -> Tensor:
    """Cut a stream (m,) into windows that score every token but the first once, (n, T+1) int64, at most `limit`.

    If there are more, `limit` of them are drawn and stay in order. The last, shorter window is left out.

    Raises:
        ValueError: the stream is shorter than one window.
    """
    count = (len(tokens) - 1) // context
    if count < 1:
        raise ValueError(f"a stream of {len(tokens)} tokens holds no window of {context} + 1")
    chosen = torch.arange(count)
    if limit < count:
        chosen = torch.randperm(count, generator=generator(seed, f"rows/{context}"))[:limit].sort().values
    return torch.stack([tokens[i * context : (i + 1) * context + 1].to(torch.int64) for i in chosen.tolist()])


def token_counts(tokens: Tensor, vocabulary: int) -> Tensor:
    """Count how often each id occurs in a stream, which may be memory-mapped; returns (V,) int64."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for first in range(0, len(tokens), _CHUNK):
        counts += torch.bincount(tokens[first : first + _CHUNK].to(torch.int64), minlength=vocabulary)
    return counts


def rarest(counts: Tensor, number: int, *, barred: int) -> Tensor:
    """Return the `number` rarest ids that occur, (k,), rarest first and equal counts by id, without `barred`."""
    known = counts.clone()
    known[barred] = 0
    order = torch.argsort(known, stable=True)
    return order[known[order] > 0][:number]


def never_seen(counts: Tensor) -> Tensor:
    """Return the ids that do not occur, (k,)."""
    return (counts == 0).nonzero().flatten()


def with_repeats(rows: Tensor, candidates: Tensor, *, place: int, times: int, seed: int, stream: str) -> Tensor:
    """Insert `times` copies of one token, drawn per row from `candidates`, at position `place`; returns (n, T+1).

    The ids after `place` move back, and the end of the row is cut off.
    """
    drawn = torch.randint(len(candidates), (len(rows),), generator=generator(seed, stream))
    runs = candidates[drawn][:, None].expand(-1, times)
    return torch.cat((rows[:, :place], runs, rows[:, place : rows.shape[1] - times]), dim=1)
