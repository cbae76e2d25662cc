"""Beyond the paper: a tapered norm whose c is a vector, the least-squares scale of each feature by itself.

Shapes: h (..., D), v = h, or h - mean(h) of a LayerNorm; s = r(h) or sigma(h) (..., 1); c (D,).

    c_j = argmin E (v_j gamma_j / s - c_j v_j gamma_j)^2 = E[v_j^2 / s] / E[v_j^2]

gamma_j cancels, and so it is left out. A feature that is always 0 takes the least-squares scale of all features
together. diag(c gamma_t) is as linear as c diag(gamma_t), and folds alike. With c the paper's scalar this would be the
weighted mean of the c_j, weights gamma_j^2 E[v_j^2]: features that are large where s is large want a smaller constant.
"""

import torch
from torch import Tensor

from .calibrate import RunningMean
from .errors import UserError
from .norms import TaperNorm, centred, norm_scale


class FeaturewiseNorm(TaperNorm):
    """The tapered form with c (D,); mixed in before the scalar one's class."""

    c: Tensor  # (D,) NaN until calibrated
    statistics: RunningMean  # means of v^2 / s, then of v^2: (2 D,)

    @torch.no_grad()
    def _collect(self, h: Tensor) -> None:
        h = h.to(self.statistics.sums.dtype)
        squares = centred(self, h).square().flatten(0, -2)  # (tokens, D)
        scale = norm_scale(self, h).flatten(0, -2)
        self.statistics.add(torch.cat([(squares / scale).sum(0), squares.sum(0)]), len(squares))

    def best_c(self) -> Tensor:
        """c* (D,), from the statistics.

        Raises:
            UserError: none were collected, or they are not finite.
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


_FEATUREWISE: dict[type[TaperNorm], type[FeaturewiseNorm]] = {}


def make_featurewise(norm: TaperNorm) -> FeaturewiseNorm:
    """Give a tapered norm that is not calibrated yet a c per feature, in place."""
    kind = type(norm)
    if kind not in _FEATUREWISE:
        _FEATUREWISE[kind] = type(f"Featurewise{kind.__name__}", (FeaturewiseNorm, kind), {})
    rate, width = norm.statistics.rate, len(norm.gamma_t)
    norm.__class__ = _FEATUREWISE[kind]
    assert isinstance(norm, FeaturewiseNorm)
    norm.c = torch.full((width,), torch.nan, dtype=norm.c.dtype, device=norm.c.device)
    norm.statistics = RunningMean(2 * width, rate, dtype=norm.gamma_t.dtype, device=norm.c.device)
    return norm
