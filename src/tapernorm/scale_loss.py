"""The pre-logit scale, its target and the fixed-target loss that anchors it: equation (5) of `taper`.

`counted` is whether each token counts, (B, T, 1) bool; None: all of them do.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .calibrate import RunningMean
from .norms import Gate, is_norm, norm_scale
from .token_mask import mean_over, number_of, sum_over
from .util.wide_buffers import WideBuffers

ScaleLoss = Callable[..., Tensor]  # of scales (B, T, 1) and their target (); behind them `counted`, where there is one


class ScaleProbe(nn.Module):
    """Keeps the last pre-logit residual stream h (B, T, D): the input of the final norm.

    It lives inside the final norm, so that it is copied and moved with the model.
    """

    handle: RemovableHandle  # of its hook; a pickle takes it along, so that no later hook gets the same number

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.gate: Gate | None = None  # of the taper that observes; None: nothing is collected
        self.anchor: ScaleTarget | None = None
        self.levels: Any = None  # the running means of `level_loss.Levels`

    @classmethod
    def on(cls, final_norm: nn.Module) -> "ScaleProbe":
        """The probe of `final_norm`, installed on first use."""
        if "probe" not in final_norm._modules:
            final_norm.probe = made = cls()
            made.handle = final_norm.register_forward_pre_hook(_keep_hidden)
        probe = final_norm.get_submodule("probe")
        assert isinstance(probe, cls)
        return probe

    @staticmethod
    def remove(final_norm: nn.Module) -> None:
        """Take the probe off `final_norm` again, if it has one."""
        probe: Any = final_norm._modules.pop("probe", None)
        if probe is not None:
            probe.handle.remove()

    def scale(self, final_norm: nn.Module) -> Tensor:
        """s of every token of the last forward pass, (B, T, 1), in float32 or wider."""
        if self.hidden is None:
            raise RuntimeError("no forward pass yet: the pre-logit scale is that of the last one")
        h = self.hidden.to(torch.promote_types(self.hidden.dtype, torch.float32))
        if not is_norm(final_norm):  # a map without statistics divides by nothing
            return h.square().mean(-1, keepdim=True).sqrt()
        return norm_scale(final_norm, h)

    @torch.no_grad()
    def collect(self, final_norm: nn.Module) -> None:
        """Add the pass at hand to the means behind s_tgt and the levels, while the taper observes."""
        gate, anchor = self.gate, self.anchor
        if gate is None or anchor is None or not (gate.observing and final_norm.training):
            return
        scale = self.scale(final_norm)
        counted = None if gate.tokens is None else gate.tokens.counted(scale)
        anchor.running.add(sum_over(scale, counted), number_of(scale, counted))
        if self.levels is not None:
            self.levels.collect()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hidden": None}  # an activation is no state, and cannot be deep-copied


def _keep_hidden(final_norm: nn.Module, args: tuple[Tensor, ...]) -> None:
    probe: Any = final_norm.probe
    probe.hidden = args[0]
    probe.collect(final_norm)


class ScaleTarget(WideBuffers):
    """s_tgt: the running mean of the batch-mean pre-logit scale while g = 1, frozen at the taper start."""

    target: Tensor  # (); NaN until frozen

    def __init__(self, rate: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.running = RunningMean(1, rate, dtype=dtype, device=device)
        wide = self.running.ema.dtype
        self.register_buffer("target", torch.full((), torch.nan, dtype=wide, device=device), persistent=False)


def fixed_target_loss(scale: Tensor, target: Tensor, counted: Tensor | None = None) -> Tensor:
    """E_{b,t} (s - s_tgt)^2 of scales (B, T, 1): the anchor of equation (5) before its weight lambda."""
    return mean_over((scale - target).square(), counted)


def relative_target_loss(scale: Tensor, target: Tensor, counted: Tensor | None = None) -> Tensor:
    """E_{b,t} ((s - s_tgt) / s_tgt)^2: beyond the paper, pulls on small scales as hard as on large ones."""
    return mean_over((scale / target - 1).square(), counted)
