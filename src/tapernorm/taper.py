"""Attach the gate to a model and drive it through a taper: the method of arXiv 2602.10408.

v = h in an RMSNorm, h - mean(h) in a LayerNorm; s = sqrt(mean(v^2) + eps).

    (1)  Norm(h) = v / s gamma (+ beta)
    (2)  Taper(h; g) = g Norm(h) + (1 - g) (c v gamma_t (+ beta))
    (3)  g(k) = 1 before k_start, a half cosine to k_end, then 0
    (4)  c = E[||v gamma||^2 / s] / E[||v gamma||^2], gamma_t = gamma, at k_start
    (5)  loss = cross-entropy + lambda E[(s - s_tgt)^2], of the final norm's s
    (6)  W' = c diag(gamma_t) W, centred over its inputs for a LayerNorm
    (7)  b' = b + beta W

The numbers are this package's own. (1), (2) stand in norms.py, (3) in schedule.py, (4) in calibrate.py, (5) in
scale_loss.py, (6) and (7) in folding.py.

taper = attach(model, schedule=GateSchedule(start=50, end=1000), anchor_weight=0.1)
for k, batch in enumerate(batches):
    taper.set_step(k)
    with taper.observe():  # may hold several micro-batches: one EMA update at its end
        loss = cross_entropy(model(batch)) + taper.anchor_loss()
        loss.backward()
    optimizer.step()
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import architecture_of, kept_norms, select_norms
from .attach_checks import require_attachable, require_options, unchanged_on_error
from .calibrate import require_training, update_means
from .level_loss import Levels
from .norms import Form, Gate, TaperNorm, require_taperable, taper, untaper
from .scale_loss import ScaleLoss, ScaleProbe, ScaleTarget, fixed_target_loss
from .schedule import GateSchedule, gate_at, whole_number
from .token_mask import TokenMask
from .util.errors import UserError
from .util.norm_driver import DRIVER, buffers_of, install, load_buffers, require_free, require_trained, uninstall


def attach(
    model: nn.Module,
    *,
    final: bool = False,
    sites: Sequence[str] | None = None,
    schedule: GateSchedule | None = None,
    ema_rate: float = 0.01,
    anchor_weight: float = 0.0,
    level_weight: float = 0.0,
) -> "Taper":
    """Turn the norms of `model` into tapered ones, in place, with one shared gate at g = 1.

    At g = 1 the model is bitwise the one it was. Build the optimizer afterwards, because each norm gains a trainable
    `gamma_t`; wrap the model afterwards too. Until `Taper.detach`, `save_pretrained` writes weights to go on from, and
    no checkpoint that loads elsewhere.

    Args:
        final: taper the final norm too (All-Taper).
        sites: patterns (`fnmatch`) of the internal norms to taper; None: all of them.
        schedule: the gate as a function of the step, for `Taper.set_step`.
        ema_rate: m of the calibration and of the scale target.
        anchor_weight: lambda of the fixed-target scale loss; 0: no such loss.
        level_weight: of the loss that levels the scales at every tapered norm, for models with massive activations
            (`levels`); 0: no such loss, and c by least squares.

    Raises:
        UserError: an argument out of range, or a model that is unknown, wrapped, attached already or cannot be tapered
            and folded. After any error the model is what it was.
    """
    names = select_norms(model, final=final, sites=sites)
    if not names:
        raise UserError("sites is empty and final is False, which tapers nothing: name norms, or leave sites out")
    return attach_norms(
        model, names, schedule=schedule, ema_rate=ema_rate, anchor_weight=anchor_weight, level_weight=level_weight
    )


def attach_norms(
    model: nn.Module,
    names: Sequence[str],
    *,
    schedule: GateSchedule | None,
    ema_rate: float,
    anchor_weight: float = 0.0,
    level_weight: float = 0.0,
    kind: "type[Taper] | None" = None,
) -> "Taper":
    """Turn exactly the norms `names` into tapered ones, as `attach` does; none: a taper that has but its scale loss.

    Args:
        kind: the class of the taper.
    """
    weights = {"anchor_weight": anchor_weight, "level_weight": level_weight}
    require_options(schedule=schedule, ema_rate=ema_rate, **weights)
    require_free(model)
    require_attachable(model, names)
    norms = {name: model.get_submodule(name) for name in names}
    for norm in norms.values():
        require_taperable(norm)
    arch = architecture_of(model)
    touched = [model, *map(model.get_submodule, (arch.trunk, arch.final)), *norms.values()]
    with unchanged_on_error(touched):
        gate = Gate(device=next(model.parameters()).device)
        tapered = {name: taper(norm, gate, ema_rate=ema_rate) for name, norm in norms.items()}
        made = (kind or Taper)(model, tapered, gate, schedule=schedule, ema_rate=ema_rate, **weights)
        install(made, model)
    return made


def taper_of(model: nn.Module) -> "Taper":
    """The taper that drives `model`, for instance of a deep copy.

    Raises:
        UserError: the model carries none.
    """
    if DRIVER not in model.__dict__:
        raise UserError(f"this {type(model).__name__} carries no taper: call tapernorm.attach(model)")
    return model.__dict__[DRIVER]


def forget_taper(model: nn.Module) -> None:
    """Take the taper, its hooks and its probes off `model`, whose norms are no longer its own."""
    uninstall(model)
    for name in architecture_of(model).norms(model):
        ScaleProbe.remove(model.get_submodule(name))


class Taper:
    """Drives the tapered norms of one model: gate, calibration and anchor. Made by `attach`.

    Attributes:
        tokens: which tokens of the last forward pass count.
        scale_loss: of scales (B, T, 1), their target () and, with a mask, whether each token counts (B, T, 1).
    """

    def __init__(
        self,
        model: nn.Module,
        norms: dict[str, TaperNorm],
        gate: Gate,
        *,
        schedule: GateSchedule | None,
        ema_rate: float,
        anchor_weight: float,
        level_weight: float = 0.0,
    ) -> None:
        self._model = model
        self._norms = norms
        self._final_norm = model.get_submodule(architecture_of(model).final)
        self._gate = gate
        self.tokens = gate.tokens = TokenMask(model.get_submodule(architecture_of(model).trunk))
        self._probe = ScaleProbe.on(self._final_norm)
        gain = next(self._final_norm.parameters())
        self._probe.anchor = self._target = ScaleTarget(ema_rate, dtype=gain.dtype, device=gain.device)
        self._levels = Levels(list(norms.values()), ema_rate) if level_weight > 0 else None
        if self._levels is not None:
            self._probe.levels = self._levels
        self._probe.gate = gate
        self.schedule = schedule
        self.anchor_weight = anchor_weight
        self.level_weight = level_weight
        self.scale_loss: ScaleLoss = fixed_target_loss
        self.calibrated = False
        self._attached = True

    @property
    def swapped(self) -> tuple[str, ...]:
        """Names of the tapered norms, in the order they run."""
        return tuple(self._norms)

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the norms that stay, those of q and k inside attention among them."""
        return tuple(kept_norms(self._model, self._norms))

    @property
    def gate(self) -> Tensor:
        """g, a scalar tensor."""
        return self._gate.value

    @property
    def scale_target(self) -> Tensor:
        """s_tgt, a scalar tensor; NaN until calibrated."""
        return self._target.target

    @property
    def constants(self) -> dict[str, float]:
        """c of each tapered norm, its mean where features have one each; NaN until calibrated."""
        return {name: norm.c.mean().item() for name, norm in self._norms.items()}

    def set_gate(self, value: float) -> None:
        """Set g by hand: 1 is the standard norm, 0 the linear map, anything between the mix of both.

        Raises:
            UserError: g outside [0, 1], g < 1 before the calibration, or a detached taper.
        """
        self._require_attached()
        self._require_calibration(value)
        self._gate.set(value)

    def set_step(self, step: int) -> None:
        """Put the gate where the schedule has it at optimizer step k = `step`, before that step's forward pass.

        The first step at or after `schedule.start` that finds the model uncalibrated calibrates it.

        Raises:
            UserError: `step` is no whole number >= 0, no schedule was given, or nothing was observed before the taper
                started.
        """
        self._require_attached()
        if (known := whole_number(step)) is None or known < 0:
            raise UserError(f"set_step takes an optimizer step, a whole number >= 0, got {step!r}")
        if self.schedule is None:
            raise UserError("set_step needs a schedule: attach(model, schedule=GateSchedule(start, end))")
        tapering = step >= self.schedule.start
        if tapering and not self.calibrated:
            self.calibrate()
        if self._norms:  # without any the gate stays at 1: the scale loss alone starts
            value = gate_at(step, self.schedule)
            self._gate.set(value, Form.MIX if tapering and value > 0 else None)

    def calibrate(self) -> None:
        """Equation (4), and the target of (5): freeze c, gamma_t = gamma and s_tgt from what was observed at g = 1.

        Raises:
            UserError: nothing was observed, or it was not finite.
        """
        self._require_attached()
        levels = self._levels  # all of the constants, or nothing changes
        constants = [norm.best_c() for norm in self._norms.values()] if levels is None else levels.constants()
        (target,) = self._target.running.value()
        if self.anchor_weight > 0 and not torch.isfinite(target):
            raise UserError(
                f"cannot set the scale target ({target.item()}): train at g = 1 inside Taper.observe() before the "
                "taper starts, or attach without anchor_weight"
            )
        for norm, c in zip(self._norms.values(), constants, strict=True):
            norm.calibrate(c)
        self._target.target.copy_(target)
        self.calibrated = True

    @contextmanager
    def observe(self, mask: Tensor | Sequence[Tensor] | None = None) -> Iterator[None]:
        """Collect statistics in training passes at g = 1 inside; one EMA update at the end.

        A position counts where the `attention_mask` of its pass is not 0. Under torch.distributed, the update is over
        the batches of all processes. An error inside drops what was collected. Past the calibration nothing is.

        Args:
            mask: in the place of `attention_mask`, for a model that takes none: (B, T) integers or bools, 0 for
                padding; a list of them, one for each training pass inside.

        Raises:
            UserError: norms were in eval mode and collected nothing, or the masks are not those of the passes inside.
        """
        self._require_attached()
        running = [self._target.running, *(norm.statistics for norm in self._norms.values())]
        running += [] if self._levels is None else [self._levels.running]
        self._gate.observing = not self.calibrated and self._gate.form is Form.OBSERVE
        try:
            with self.tokens.given(mask):
                yield
            if self._gate.observing:
                require_training(self._norms)
                update_means(running)
        finally:
            self._gate.observing = False
            for mean in running:
                mean.forget()

    def anchor_loss(self) -> Tensor:
        """lambda E[(s - s_tgt)^2] of the last forward pass (5), a scalar; 0 before the taper starts or at lambda = 0.

        With a level weight, the level loss is added, from the first step on. Pure: it changes nothing.
        """
        self._require_attached()
        scale = self._probe.scale(self._final_norm)
        loss = scale.new_zeros(())
        if self.anchor_weight > 0 and self.calibrated:
            counted = self.tokens.counted(scale)
            tokens = () if counted is None else (counted,)
            loss = self.anchor_weight * self.scale_loss(scale, self._target.target, *tokens)
        if self._levels is None:
            return loss
        return loss + self.level_weight * self._levels.loss(calibrated=self.calibrated)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UserError where the optimizer lacks a parameter of a tapered norm (it was built before attach)."""
        require_trained(self._norms, optimizer, "build it after attach(), from model.parameters()")

    def detach(self) -> None:
        """Take the taper off its model, which is then a plain one, with what its own parameters have learnt.

        Raises:
            UserError: the gate is not at 1 or the taper has started, so that a plain model would be another function;
                or it is detached already.
        """
        self._require_attached()
        if self._gate.form is not Form.OBSERVE:
            raise UserError(
                f"the gate is {self._gate.value.item():g} in a taper that has started, and a plain norm is g = 1: "
                "Taper.set_gate(1) first if that is the function you want, or fold(model) at g = 0"
            )
        forget_taper(self._model)
        for norm in self._norms.values():
            untaper(norm)
        self._norms, self._attached = {}, False

    def state_dict(self) -> dict[str, Any]:
        """What the model's own state dict does not hold: gate, running means, s_tgt. Plain tensors and a bool."""
        buffers = {**self._buffers(), "gate": self._gate.value}
        return {"calibrated": self.calibrated, **{k: b.detach().clone() for k, b in buffers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; the model's own state dict is loaded beside it.

        Raises:
            UserError: the state belongs to other norms, or a tensor has another shape; nothing has changed then.
        """
        buffers = self._buffers()
        load_buffers({**buffers, "gate": self._gate.value}, state, others=["calibrated"], what="taper")
        self.calibrated = state["calibrated"]
        self._gate.set(float(state["gate"]))

    def _buffers(self) -> dict[str, Tensor]:
        """Running means and s_tgt, by the names that they have in the state."""
        parts: dict[str, nn.Module] = {f"{name}.statistics": norm.statistics for name, norm in self._norms.items()}
        return buffers_of(parts | {"anchor": self._target} | ({} if self._levels is None else {"levels": self._levels}))

    def _require_attached(self) -> None:
        if not self._attached:
            raise UserError("this taper is detached and drives nothing: attach(model) gives a new one")

    def _require_calibration(self, value: float) -> None:
        if value < 1 and any(bool(norm.c.isnan().any()) for norm in self._norms.values()):
            raise UserError(f"gate {value} needs calibrated norms: call calibrate(), or load a calibrated model")
