"""Warnings of norms that one constant cannot replace, measured on a few rows of text, with the options that help."""

import shlex
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn

from tapernorm.models.decoder import parameter_count
from tapernorm.spread import FIRST_LIMIT, TAIL_LIMIT, ScaleSpread, measure
from tapernorm.util.module_names import of_blocks, patterns

from ..data.tokenizers import Coder, piece_of

LEVEL = 0.2  # weight that levelled a model with massive activations
_OPERATIONS = 3e11  # FLOPs of one sample, about: seconds on two cores
_FEWEST, _MOST = 256, 8192  # tokens of one sample
_ROW = 128  # tokens
LEAST = 2  # rows of one sample
_BATCH = 8  # rows per forward pass
_NAMED = 3  # tokens named in a warning


@dataclass(frozen=True)
class ScaleSample:
    """The scales at every norm of a model on a few rows of text."""

    spreads: dict[str, ScaleSpread]  # by norm, in the order of the forward pass
    rows: Tensor  # (R, T) ids
    coder: Coder

    def warnings(self, tapered: Collection[str], *, level_weight: float) -> list[str]:
        """Return lines that warn of the tapered norms that one constant cannot replace; none if there is no such norm.

        Args:
            tapered: names of the norms to taper.
            level_weight: value of --level.
        """
        unfit = {name: self.spreads[name] for name in tapered if self.spreads[name].misfits}
        if not unfit:
            return []
        first = {name: spread for name, spread in unfit.items() if "first" in spread.misfits}
        tail = {name: spread for name, spread in unfit.items() if "tail" in spread.misfits}
        lines = [
            f"one constant cannot replace {len(unfit)} of the {len(tapered)} norms to taper, by their token scales:"
        ]
        if first:
            most = max(spread.first / spread.median for spread in first.values())
            told = f"scale at position 0 above {FIRST_LIMIT:g} medians (up to {most:.3g})"
            lines.append(f"  {told}: {', '.join(of_blocks(first))}")
        if tail:
            most = max(spread.p99_9 / spread.median for spread in tail.values())
            told = f"p99.9 of the scales at later positions above {TAIL_LIMIT:g} medians (up to {most:.3g})"
            lines.append(f"  {told}: {', '.join(of_blocks(tail))}")
            lines.append(f"  largest scales, in medians: {', '.join(self._largest(tail.values()))}")
        chosen = " (given)" if level_weight else ""
        level = f"--level {level_weight or LEVEL:g} makes these scales equal before the norms are gone{chosen}"
        return [*lines, f"  {level}", *self._others(tapered, unfit)]

    def _others(self, tapered: Collection[str], unfit: Collection[str]) -> list[str]:
        """Return a line with the option that tapers only the other norms, if there are any."""
        *internal, final = self.spreads
        others = patterns([name for name in tapered if name not in unfit and name != final], internal)
        if not others:
            return []
        without = " without --final" if final in unfit else ""
        return [f"  --sites {' '.join(map(shlex.quote, others))}{without} tapers only the other norms"]

    def _largest(self, spreads: Collection[ScaleSpread]) -> list[str]:
        """Name the tokens with the largest scales in medians of their norm, each token once."""
        times = [(outlier.scale / spread.median, outlier) for spread in spreads for outlier in spread.worst]
        found: dict[str, str] = {}
        for factor, outlier in sorted(times, key=lambda pair: -pair[0]):
            piece = piece_of(self.coder, self.rows[outlier.row].tolist(), outlier.position)
            found.setdefault(piece, f"{piece!r} at position {outlier.position} ({factor:.3g})")
        return list(found.values())[:_NAMED]


def sample_scales(model: nn.Module, rows: Tensor, coder: Coder) -> ScaleSample:
    """Measure the scales of a model on the first few of the rows (R, T) of its training text."""
    few, length = shape_of_sample(parameter_count(model), rows.shape[1])
    some = rows[:few, :length]
    return ScaleSample(measure(model, some, batch=min(len(some), _BATCH)), some, coder)


def shape_of_sample(parameters: int, context: int) -> tuple[int, int]:
    """Return the rows and the tokens per row of a sample, for a model of so many parameters."""
    length = min(context, _ROW)
    tokens = min(max(_OPERATIONS / 2 / parameters, _FEWEST), _MOST)
    return max(LEAST, int(tokens / length)), length
