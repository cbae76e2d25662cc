"""The pre-logit scale, its target, and the fixed-target loss that anchors it: equation (5) of `taper`.

`counted` says which tokens count, (B, T, 1) bool. None means all of them.
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

ScaleLoss = Callable[..., Tensor]  # takes scales (B, T, 1), their target () and, with a mask, `counted`


class ScaleProbe(nn.Module):
    """The probe of a norm: it keeps the norm's last input h (B, T, D). At the final norm, h is the pre-logit stream.

    It is a submodule of the norm, so that it is copied and moved with the model.
    """

    handle: RemovableHandle  # of its hook; pickled too, so that no later hook gets the same id

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.gate: Gate | None = None  # None: collect nothing
        self.anchor: ScaleTarget | None = None
        self.levels: Any = None  # a `level_loss.Levels`, or None

    @classmethod
    def on(cls, final_norm: nn.Module) -> "ScaleProbe":
        """Return the probe of `final_norm`, and install it on first use."""
        if "probe" not in final_norm._modules:
            final_norm.probe = made = cls()
            made.handle = final_norm.register_forward_pre_hook(_keep_hidden)
        probe = final_norm.get_submodule("probe")
        assert isinstance(probe, cls)
        return probe

    @staticmethod
    def remove(final_norm: nn.Module) -> None:
        """Remove the probe from `final_norm`, if there is one."""
        probe: Any = final_norm._modules.pop("probe", None)
        if probe is not None:
            probe.handle.remove()

    def scale(self, final_norm: nn.Module) -> Tensor:
        """Return the scale s (B, T, 1) of every token of the last forward pass, in float32 or wider.

        Raises:
            RuntimeError: there was no forward pass yet.
        """
        if self.hidden is None:
            raise RuntimeError("no forward pass yet: run the model before you ask for its pre-logit scale")
        h = self.hidden.to(torch.promote_types(self.hidden.dtype, torch.float32))
        if not is_norm(final_norm):  # a replacement without per-token statistics
            return h.square().mean(-1, keepdim=True).sqrt()
        return norm_scale(final_norm, h)

    @torch.no_grad()
    def collect(self, final_norm: nn.Module) -> None:
        """Add the current pass to the means behind s_tgt and the levels, if the taper observes."""
        gate, anchor = self.gate, self.anchor
        if gate is None or anchor is None or not (gate.observing and final_norm.training):
            return
        scale = self.scale(final_norm)
        counted = None if gate.tokens is None else gate.tokens.counted(scale)
        anchor.running.add(sum_over(scale, counted), number_of(scale, counted))
        if self.levels is not None:
            self.levels.collect()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hidden": None}  # an activation with a gradient cannot be deep-copied


def _keep_hidden(final_norm: nn.Module, args: tuple[Tensor, ...]) -> None:
    probe: Any = final_norm.probe
    probe.hidden = args[0]
    probe.collect(final_norm)


class ScaleTarget(WideBuffers):
    """The scale target s_tgt: the EMA of the batch-mean pre-logit scale at g = 1, frozen by the calibration."""

    target: Tensor  # (); NaN before the calibration

    def __init__(self, rate: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.running = RunningMean(1, rate, dtype=dtype, device=device)
        wide = self.running.ema.dtype
        self.register_buffer("target", torch.full((), torch.nan, dtype=wide, device=device), persistent=False)


def fixed_target_loss(scale: Tensor, target: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return E_{b,t} (s - s_tgt)^2 of scales (B, T, 1), the anchor of equation (5) before its weight lambda."""
    return mean_over((scale - target).square(), counted)


def relative_target_loss(scale: Tensor, target: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return E_{b,t} ((s - s_tgt) / s_tgt)^2, the relative anchor. It is not in the paper.

    It depends on the ratios s / s_tgt alone, so that models of small and of large scale are anchored alike.
    """
    return mean_over((scale / target - 1).square(), counted)
