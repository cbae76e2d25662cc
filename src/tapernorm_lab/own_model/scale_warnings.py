"""Which norms meet tokens that one constant cannot stand for, on a few rows of text, and what to do against it."""

import shlex
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn

from tapernorm.models.decoder import parameter_count
from tapernorm.spread import FIRST_LIMIT, TAIL_LIMIT, ScaleSpread, measure
from tapernorm.util.module_names import of_blocks, patterns

from ..data.tokenizers import Coder, piece_of

LEVEL = 0.2  # that levelled a model of massive activations
_OPERATIONS = 3e11  # of one sample, about: seconds on two cores
_FEWEST, _MOST = 256, 8192  # tokens of one sample
_ROW = 128  # tokens
LEAST = 2  # rows of one sample
_BATCH = 8  # rows per forward pass
_NAMED = 3  # tokens


@dataclass(frozen=True)
class ScaleSample:
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


def sample_scales(model: nn.Module, rows: Tensor, coder: Coder) -> ScaleSample:
    """The scales of a model on a few of the rows (R, T) that it is about to be trained on."""
    few, length = shape_of_sample(parameter_count(model), rows.shape[1])
    some = rows[:few, :length]
    return ScaleSample(measure(model, some, batch=min(len(some), _BATCH)), some, coder)


def shape_of_sample(parameters: int, context: int) -> tuple[int, int]:
    """Rows and tokens of a row that a sample for so many parameters takes."""
    length = min(context, _ROW)
    tokens = min(max(_OPERATIONS / 2 / parameters, _FEWEST), _MOST)
    return max(LEAST, int(tokens / length)), length
