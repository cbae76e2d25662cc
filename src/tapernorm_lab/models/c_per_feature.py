"""Beyond the paper: a tapered norm whose c is a vector, with the least-squares scale of each feature.

Shapes: h (..., D), v = h, or h - mean(h) of a LayerNorm; s = r(h) or sigma(h) (..., 1); c (D,).

    c_j = argmin E (v_j gamma_j / s - c_j v_j gamma_j)^2 = E[v_j^2 / s] / E[v_j^2]

gamma_j cancels and is left out. A feature that is always 0 gets the least-squares scale of all features together.
diag(c gamma_t) is as linear as c diag(gamma_t), and folds in the same way. The paper's scalar c is the mean of the c_j
with weights gamma_j^2 E[v_j^2]. Features that are large where s is large need a smaller constant.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tapernorm.calibrate import RunningMean
from tapernorm.norms import TaperNorm, centred, norm_scale
from tapernorm.token_mask import number_of
from tapernorm.util.errors import UserError


class FeaturewiseNorm(TaperNorm):
    """The tapered form with c (D,), as a mixin that precedes the class with a scalar c."""

    stored_as: ClassVar[str] = "tapered_per_feature"
    c: Tensor  # (D,) NaN until calibrated
    statistics: RunningMean  # means of v^2 / s, then of v^2: (2 D,)

    def _add(self, h: Tensor, counted: Tensor | None) -> None:
        squares = centred(self, h).square().flatten(0, -2)  # (tokens, D)
        ratios = squares / norm_scale(self, h).flatten(0, -2)
        number = number_of(squares[:, :1], counted)
        if counted is not None:
            squares, ratios = (torch.where(counted.flatten(0, -2), part, 0) for part in (squares, ratios))
        self.statistics.add(torch.cat([ratios.sum(0), squares.sum(0)]), number)

    def best_c(self) -> Tensor:
        """Return c* (D,) from the collected statistics.

        Raises:
            UserError: no statistics were collected, or they are not finite.
        """
        numerator, denominator = self.statistics.value().chunk(2)
        pooled = numerator.sum() / denominator.sum()
        c = torch.where(denominator > 0, numerator / denominator, pooled)
        if not bool(c.isfinite().all()):
            raise UserError(
                f"cannot calibrate after {int(self.statistics.updates)} updates of its statistics "
                f"({int((~c.isfinite()).sum())} of {len(c)} features without a finite c*): "
                "train at g = 1 inside Taper.observe() before the taper starts"
            )
        return c

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the norm with a scalar c, whose class `_unset` changes on loading."""
        make, arguments, *state = super().__reduce_ex__(protocol)
        return (_unset, (make, *arguments), *state)


_FEATUREWISE: dict[type[TaperNorm], type[FeaturewiseNorm]] = {}


def _featurewise_class(kind: type[TaperNorm]) -> type[FeaturewiseNorm]:
    if kind not in _FEATUREWISE:
        _FEATUREWISE[kind] = type(f"Featurewise{kind.__name__}", (FeaturewiseNorm, kind), {})
    return _FEATUREWISE[kind]


def _unset(make: Callable[..., TaperNorm], *arguments: Any) -> TaperNorm:
    norm = make(*arguments)
    norm.__class__ = _featurewise_class(type(norm))
    return norm


def make_featurewise(norm: TaperNorm) -> FeaturewiseNorm:
    """Give a tapered norm that is not yet calibrated one c per feature, in place."""
    rate, width = norm.statistics.rate, len(norm.gamma_t)
    norm.__class__ = _featurewise_class(type(norm))
    assert isinstance(norm, FeaturewiseNorm)
    norm.c = torch.full((width,), torch.nan, dtype=norm.c.dtype, device=norm.c.device)
    norm.statistics = RunningMean(2 * width, rate, dtype=norm.gamma_t.dtype, device=norm.c.device)
    return norm


def restore(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Give the named tapered norms of a model one c per feature, before its weights are loaded."""
    for name in names:
        norm = model.get_submodule(name)
        assert isinstance(norm, TaperNorm)  # the library has attached it before
        make_featurewise(norm)
