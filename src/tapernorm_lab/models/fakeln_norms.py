"""FakeLayerNorm: a LayerNorm whose per-token sigma is replaced by a frozen mean (method.md section 10).

Shapes: h (..., D), gamma, beta (D,), sigma_bars (P,), one per part of the norm; W (in, out), as a Conv1D stores it.

    FakeLN(h) = (h - mu) / sigma_bar * gamma + beta

GPT-2's ln_1 has two parts that are removed at different steps: the input of q and k, and the input of v. Once they
differ, the norm returns both side by side, and the `SplitConv1D` after it multiplies each by its own columns.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import LayerNorm
from transformers.pytorch_utils import Conv1D

from tapernorm.calibrate import RunningMean
from tapernorm.norms import LinearForm, centred, norm_scale
from tapernorm.token_mask import (
    TokenMask,
    in_backward,
    number_of,
    sum_over,
)
from tapernorm.util.errors import UserError
from tapernorm.util.wide_buffers import WideBuffers

WHOLE = ("",)
SPLIT = ("qk", "v")


class FakeLayerNorm(WideBuffers, LayerNorm):
    """A LayerNorm that normalises until its parts are removed, one by one.

    With no part removed it runs LayerNorm's own forward, with the same bits. With one of two parts removed it returns
    (..., 2 D), the input of q and k before that of v. With all parts removed the mean is the only per-token statistic.
    """

    stored_as: ClassVar[str] = "fake"
    parts: tuple[str, ...]
    removed: tuple[bool, ...]  # per part; changes only at removals, so that compiled steps stay valid in between
    observing: bool  # whether training passes collect statistics: inside FakeLN.observe() only
    sigma_bars: Tensor  # (P,) NaN until frozen
    statistics: RunningMean  # mean of sigma over tokens
    tokens: TokenMask | None = None  # mask of the tokens of a pass that count; None: all

    def forward(self, h: Tensor) -> Tensor:
        if all(self.removed):
            return self.linear(h, self.sigma_bars)
        if self.observing and self.training:
            self._collect(h.detach())
        standard = super().forward(h)
        if not any(self.removed):
            return standard
        bars = self.sigma_bars.split(1)
        parts = [self.linear(h, bar) if gone else standard for gone, bar in zip(self.removed, bars, strict=True)]
        return torch.cat(parts, -1)

    def linear(self, h: Tensor, sigma_bars: Tensor) -> Tensor:
        """Return FakeLN of h (..., D) for each of sigma_bars (P,), side by side: (..., P D)."""
        coefficients = (self.weight / sigma_bars[:, None]).to(h.dtype)  # (P, D)
        scaled = centred(self, h)[..., None, :] * coefficients  # (..., P, D)
        return (scaled if self.bias is None else scaled + self.bias.to(h.dtype)).flatten(-2)

    @torch.no_grad()
    def _collect(self, h: Tensor) -> None:
        counted = None if self.tokens is None else self.tokens.counted(h)
        if counted is not None and in_backward():  # the mask may be that of a later pass
            return
        sigma = norm_scale(self, h.to(self.statistics.sums.dtype))  # (..., 1)
        self.statistics.add(sum_over(sigma, counted), number_of(sigma, counted))

    def linear_form(self, consumer: nn.Module | None = None) -> LinearForm:
        """Return the norm as the linear map that folds into `consumer` (method.md section 6).

        Raises:
            UserError: a part still normalises.
        """
        if not all(self.removed):
            raise UserError("a FakeLN norm still normalises: train through the last removal, then fold")
        gamma, inverse = self.weight.detach().double(), 1 / self.sigma_bars.double()
        bias = None if self.bias is None else self.bias.detach().double()
        if self.parts != SPLIT:
            return LinearForm(coefficient=gamma * inverse, centre=True, bias=bias)
        columns = torch.tensor([2 * len(gamma), len(gamma)], device=gamma.device)  # q and k, then v
        return LinearForm(gamma, centre=True, bias=bias, output_scale=inverse.repeat_interleave(columns))


class SplitConv1D(Conv1D):
    """GPT-2's c_attn after a `FakeLayerNorm`: q and k from the first half of its input, v from the second.

    An input of ordinary width, which q, k and v share, takes Conv1D's own forward.
    """

    plain: ClassVar[type[nn.Module]] = Conv1D

    def forward(self, x: Tensor) -> Tensor:
        if x.size(-1) == self.nx:
            return super().forward(x)
        columns = [2 * self.nx, self.nx]
        parts = zip(
            x.reshape(-1, 2 * self.nx).split(self.nx, -1),
            self.weight.split(columns, -1),
            self.bias.split(columns),
            strict=True,
        )
        outputs = [torch.addmm(bias, rows, weight) for rows, weight, bias in parts]
        return torch.cat(outputs, -1).view(*x.shape[:-1], self.nf)


def require_plain(model: nn.Module, name: str) -> None:
    """Raise UserError unless the norm `name` of `model`, and the c_attn after an ln_1, can take their fake form."""
    norm = model.get_submodule(name)
    if type(norm) is not LayerNorm or not norm.elementwise_affine:
        raise UserError(f"{name} is {norm}: FakeLN replaces plain LayerNorms with a gain; give it a fresh GPT-2")
    attention = _attention_map(model, name)
    if attention is not None and (type(attention) is not Conv1D or attention.nf != 3 * attention.nx):
        raise UserError(f"{name} feeds {attention}: FakeLN splits a plain Conv1D of q, k and v; give it a fresh GPT-2")


def make_fake(model: nn.Module, name: str, *, ema_rate: float = 1.0) -> FakeLayerNorm:
    """Turn the norm `name` of `model`, and the c_attn after an ln_1, into their fake form, in place.

    Raises:
        UserError: the norm is not a plain LayerNorm, or c_attn is not a plain Conv1D.
    """
    require_plain(model, name)
    norm = model.get_submodule(name)
    attention = _attention_map(model, name)
    gamma = norm.get_parameter("weight")
    statistics = RunningMean(1, ema_rate, dtype=gamma.dtype, device=gamma.device)  # refuses a rate before any change
    if attention is not None:
        attention.__class__ = SplitConv1D
    norm.__class__ = FakeLayerNorm
    assert isinstance(norm, FakeLayerNorm)
    norm.parts = WHOLE if attention is None else SPLIT
    norm.removed = (False,) * len(norm.parts)
    norm.observing = False
    norm.statistics = statistics
    unknown = torch.full((len(norm.parts),), torch.nan, dtype=norm.statistics.sums.dtype, device=gamma.device)
    norm.register_buffer("sigma_bars", unknown)
    return norm


@torch.no_grad()
def restore_fake(model: nn.Module, sigma_bars: Mapping[str, Tensor]) -> None:
    """Restore the fake form of a fresh model's norms from `sigma_bars`, norm -> (P,).

    A part is removed if its sigma_bar is not NaN.

    Raises:
        UserError: a norm is not a plain LayerNorm, or has another number of parts.
    """
    for name, bars in sigma_bars.items():
        norm = make_fake(model, name)
        if bars.shape != norm.sigma_bars.shape:
            raise UserError(f"{name} takes {len(norm.parts)} sigma_bar, and {tuple(bars.shape)} were given")
        norm.sigma_bars.copy_(bars)
        norm.removed = tuple((~bars.isnan()).tolist())


def restore(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Restore the fake form of the named norms of a fresh model from a saved `state`.

    Raises:
        UserError: `state` lacks their sigma_bars.
    """
    keys = {name: f"{name}.sigma_bars" for name in names}
    if missing := [key for key in keys.values() if key not in state]:
        raise UserError(
            f"config.json says FakeLN, but the weights lack {', '.join(missing)}: run the job that wrote it again"
        )
    restore_fake(model, {name: state[key] for name, key in keys.items()})


def _attention_map(model: nn.Module, name: str) -> nn.Module | None:
    """Return the c_attn that an ln_1 feeds; None for any other norm."""
    if name.split(".")[-1] != "ln_1":
        return None
    return model.get_submodule(name.removesuffix("ln_1") + "attn.c_attn")
