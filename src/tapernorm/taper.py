"""Attach the gate to a model and drive it through a taper: the method of arXiv 2602.10408.

v is h in an RMSNorm, and h - mean(h) in a LayerNorm. The scale is s = sqrt(mean(v^2) + eps).

    (1)  Norm(h) = v / s gamma (+ beta)
    (2)  Taper(h; g) = g Norm(h) + (1 - g) (c v gamma_t (+ beta))
    (3)  g(k) = 1 before k_start, a half cosine to k_end, then 0
    (4)  c = E[||v gamma||^2 / s] / E[||v gamma||^2], gamma_t = gamma, at k_start
    (5)  loss = cross-entropy + lambda E[(s - s_tgt)^2], of the final norm's s
    (6)  W' = c diag(gamma_t) W, centred over its inputs for a LayerNorm
    (7)  b' = b + beta W

These equation numbers belong to this package, not to the paper. norms.py computes (1) and (2), schedule.py (3),
calibrate.py (4), scale_loss.py (5), folding.py (6) and (7).

Example:

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
from .schedule import GateSchedule, default_ema_rate, gate_at, whole_number
from .token_mask import TokenMask
from .util.errors import UserError
from .util.norm_driver import DRIVER, buffers_of, install, load_buffers, require_free, require_trained, uninstall


def attach(
    model: nn.Module,
    *,
    final: bool = False,
    sites: Sequence[str] | None = None,
    schedule: GateSchedule | None = None,
    ema_rate: float | None = None,
    anchor_weight: float = 0.0,
    level_weight: float = 0.0,
) -> "Taper":
    """Replace the norms of `model` by tapered norms, in place, with one shared gate at g = 1.

    At g = 1 the model computes bitwise what it computed before. Attach the taper before you build the optimizer,
    because each tapered norm gains a trainable `gamma_t`. Attach it before you wrap the model, too. Until
    `Taper.detach`, `save_pretrained` writes a training checkpoint, which `from_pretrained` refuses.

    Args:
        model: a pre-norm Transformer of a class in `tapernorm.architectures.ARCHITECTURES`.
        final: whether to taper the final norm too (All-Taper).
        sites: `fnmatch` patterns of the internal norms to taper. None tapers all of them.
        schedule: the gate g as a function of the optimizer step. `Taper.set_step` needs it.
        ema_rate: m in (0, 1] of the means behind c and s_tgt; None: `default_ema_rate`. Pretrained models want 0.1.
        anchor_weight: lambda >= 0 of the fixed-target scale loss, equation (5). 0 leaves that loss out.
        level_weight: weight >= 0 of the loss that levels the token scales at every tapered norm. It helps models with
            massive activations. 0 leaves that loss out and fits c by least squares.

    Returns:
        The taper that drives `model`.

    Raises:
        UserError: an argument is out of range. The class of the model is unknown, or a wrapper hides it. The model
            carries a taper already. A norm cannot be tapered or folded. After any error the model is unchanged.
    """
    names = select_norms(model, final=final, sites=sites)
    if not names:
        raise UserError("sites is empty and final is False, which tapers nothing: name norms, or leave sites out")
    rate = default_ema_rate(schedule) if ema_rate is None else ema_rate
    weights: Any = {"anchor_weight": anchor_weight, "level_weight": level_weight}
    return attach_norms(model, names, schedule=schedule, ema_rate=rate, **weights)


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
    """Replace exactly the norms `names` by tapered norms, as `attach` does.

    Without names, the taper computes its scale loss alone. `kind` is the class of the taper.
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
    """Return the taper that drives `model`. A deep copy of a model has a taper of its own.

    Raises:
        UserError: the model carries no taper.
    """
    if DRIVER not in model.__dict__:
        raise UserError(f"this {type(model).__name__} carries no taper: call tapernorm.attach(model)")
    return model.__dict__[DRIVER]


def forget_taper(model: nn.Module) -> None:
    """Remove the taper, its hooks and its probes from `model`."""
    uninstall(model)
    for name in architecture_of(model).norms(model):
        ScaleProbe.remove(model.get_submodule(name))


class Taper:
    """The driver of the tapered norms of one model: gate, calibration and anchor. `attach` makes it.

    Attributes:
        schedule: the gate schedule, or None.
        anchor_weight: lambda of equation (5).
        level_weight: weight of the level loss.
        calibrated: whether c, gamma_t and s_tgt are frozen.
        tokens: the mask of the last forward pass, which says which tokens count.
        scale_loss: the anchor before its weight, a function of scales (B, T, 1) and target (). With a mask it also
            takes a bool (B, T, 1) that says which tokens count.
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
        """Full names of the tapered norms, in the order in which they run."""
        return tuple(self._norms)

    @property
    def kept(self) -> tuple[str, ...]:
        """Full names of the norms that stay, including the q and k norms inside attention."""
        return tuple(kept_norms(self._model, self._norms))

    @property
    def gate(self) -> Tensor:
        """The gate g in [0, 1], a scalar tensor."""
        return self._gate.value

    @property
    def scale_target(self) -> Tensor:
        """The scale target s_tgt of equation (5), a scalar tensor. It is NaN before the calibration."""
        return self._target.target

    @property
    def constants(self) -> dict[str, float]:
        """The constant c of each tapered norm, or its mean over features. It is NaN before the calibration."""
        return {name: norm.c.mean().item() for name, norm in self._norms.items()}

    def set_gate(self, value: float) -> None:
        """Set the gate to g = `value`: 1 is the standard norm, 0 the linear map, and values between mix both.

        Raises:
            UserError: g lies outside [0, 1], g < 1 before the calibration, or the taper is detached.
        """
        self._require_attached()
        self._require_calibration(value)
        self._gate.set(value)

    def set_step(self, step: int) -> None:
        """Set the gate to g(k) of equation (3) for optimizer step k = `step`. Call it before the step's forward pass.

        The first step at or after `schedule.start` calibrates the model, unless it is calibrated already.

        Raises:
            UserError: `step` is not an integer >= 0, there is no schedule, or nothing was observed before its start.
        """
        self._require_attached()
        if (known := whole_number(step)) is None or known < 0:
            raise UserError(f"step must be an optimizer step, a whole number >= 0, got {step!r}")
        if self.schedule is None:
            raise UserError("set_step needs a schedule: attach(model, schedule=GateSchedule(start, end))")
        tapering = step >= self.schedule.start
        if tapering and not self.calibrated:
            self.calibrate()
        if self._norms:  # a taper without norms keeps the gate at 1, and only its scale loss starts
            value = gate_at(step, self.schedule)
            self._gate.set(value, Form.MIX if tapering and value > 0 else None)

    def calibrate(self) -> None:
        """Freeze c of equation (4) and s_tgt of (5) from the statistics observed at g = 1, and copy gamma to gamma_t.

        Raises:
            UserError: nothing was observed, or a statistic is not finite. The taper is unchanged then.
        """
        self._require_attached()
        levels = self._levels
        constants = [norm.best_c() for norm in self._norms.values()] if levels is None else levels.constants()
        (target,) = self._target.running.value()
        if self.anchor_weight > 0 and not torch.isfinite(target):
            raise UserError(
                f"cannot set the scale target s_tgt ({target.item()}): train at g = 1 inside Taper.observe() before "
                "the taper starts, or attach with anchor_weight=0"
            )
        for norm, c in zip(self._norms.values(), constants, strict=True):
            norm.calibrate(c)
        self._target.target.copy_(target)
        self.calibrated = True

    @contextmanager
    def observe(self, mask: Tensor | Sequence[Tensor] | None = None) -> Iterator[None]:
        """Collect the statistics behind c and s_tgt in the training passes of one optimizer step.

        The context ends with one EMA update over all its micro-batches, and over all ranks of torch.distributed. A
        position counts where the `attention_mask` of its pass is not 0. An exception inside discards the step's
        statistics. After the calibration, nothing is collected.

        Args:
            mask: replaces `attention_mask`, for models that take none. It is (B, T) integers or bools, 0 for padding,
                or a list with one such mask for each training pass.

        Raises:
            UserError: the norms are in eval mode and collected nothing, or the masks do not fit the training passes.
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
        """Return the scale loss lambda E[(s - s_tgt)^2] of the last forward pass, equation (5), as a scalar.

        It is 0 before the calibration and at lambda = 0. With a level weight, it includes the level loss from the first
        step on. The call changes no state.
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
        """Raise UserError if `optimizer` lacks a parameter of a tapered norm: it was built before `attach`."""
        require_trained(self._norms, optimizer, "build it after attach(), from model.parameters()")

    def detach(self) -> None:
        """Remove the taper from its model and restore the plain norms, with the gamma and beta trained so far.

        Raises:
            UserError: the taper has started, so that the plain model would compute another function. Or the taper is
                detached already.
        """
        self._require_attached()
        if self._gate.form is not Form.OBSERVE:
            raise UserError(
                f"cannot detach a taper that has started: the gate is {self._gate.value.item():g}, and a plain norm is "
                "g = 1. Call Taper.set_gate(1) first if you want that function, or fold(model) at g = 0"
            )
        forget_taper(self._model)
        for norm in self._norms.values():
            untaper(norm)
        self._norms, self._attached = {}, False

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the model's own state dict lacks, as plain tensors and one bool."""
        buffers = {**self._buffers(), "gate": self._gate.value}
        return {"calibrated": self.calibrated, **{k: b.detach().clone() for k, b in buffers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned. Load the model's own state dict separately.

        Raises:
            UserError: the state belongs to other norms, or a tensor has another shape. The taper is unchanged then.
        """
        buffers = self._buffers()
        load_buffers({**buffers, "gate": self._gate.value}, state, others=["calibrated"], what="taper")
        self.calibrated = state["calibrated"]
        self._gate.set(float(state["gate"]))

    def _buffers(self) -> dict[str, Tensor]:
        """Return the running means and s_tgt by their names in the state."""
        parts: dict[str, nn.Module] = {f"{name}.statistics": norm.statistics for name, norm in self._norms.items()}
        return buffers_of(parts | {"anchor": self._target} | ({} if self._levels is None else {"levels": self._levels}))

    def _require_attached(self) -> None:
        if not self._attached:
            raise UserError("this taper is detached from its model: call attach(model) for a new one")

    def _require_calibration(self, value: float) -> None:
        if value < 1 and any(bool(norm.c.isnan().any()) for norm in self._norms.values()):
            raise UserError(f"a gate of {value} needs calibrated norms: call calibrate(), or load a calibrated model")
