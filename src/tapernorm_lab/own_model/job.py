"""The settings that define the numbers of a taper: those of the request, and defaults by model size."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import nn

from tapernorm.architectures import context_of
from tapernorm.models.decoder import parameter_count
from tapernorm.util.errors import UserError

from ..config.gpt2 import FinetuneConfig, TaperWindow
from ..config.jobs import TuningJob
from ..config.sections import PositiveInt
from ..training.device import pick_device
from .options import Request

_CONTEXT = 1024  # default tokens per row, at most
_MICRO_TOKENS = 8192  # per forward pass


class TaperJob(TuningJob):
    """The settings of a taper, without model and text. With `taper` None it is a control, which keeps its norms.

    A control with a level weight has the level loss of the taper that it is a control for, at the same norms.

    The JSON keeps the form of earlier versions, in which a taper was a fine-tune of a GPT-2 of size "own". That form
    identifies run folders and checkpoints.
    """

    final: bool  # taper the final norm too
    sites: tuple[str, ...] | None  # patterns of the internal norms to taper; null: all
    level_weight: Annotated[float, Field(ge=0)]  # of the level loss, at every norm that the job tapers or would taper
    levels_fixed_at: PositiveInt | None  # optimizer step at which a levelled control fixes its levels; others: null

    @model_validator(mode="after")
    def _micro_batch_fits(self) -> Self:
        if (self.micro_batch is not None) != (
            self.level_weight > 0
        ):  # the level loss is a mean within each micro-batch
            raise ValueError(f"level_weight={self.level_weight} and micro_batch={self.micro_batch} do not go together")
        return self

    @model_validator(mode="after")
    def _control_fits(self) -> Self:
        if (self.levels_fixed_at is not None) != (self.taper is None and self.level_weight > 0):
            raise ValueError(
                f"levels_fixed_at={self.levels_fixed_at}, taper={self.taper} and level_weight={self.level_weight} do "
                "not go together"
            )
        return self

    @model_serializer(mode="wrap")
    def _as_fine_tune(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        told = serialize(self)
        final, sites, level_weight = (told.pop(name) for name in ("final", "sites", "level_weight"))
        fixed_at = told.pop("levels_fixed_at")
        method = "vanilla" if self.taper is None else "all_aux" if final else "internal_aux"
        asked_for_more = sites is not None or level_weight > 0
        more = {"sites": sites, "level_weight": level_weight} if asked_for_more else {}
        control = {} if fixed_at is None else {"final": final, "levels_fixed_at": fixed_at}
        return {"method": method, "size": "own", **told, "fakeln": None, **more, **control}


@dataclass(frozen=True)
class _Scale:
    """Defaults for models of at most `parameters`; beyond GPT-2's smallest, method.md section 10."""

    parameters: float
    lr: float  # peak
    anchor_weight: float  # lambda
    tokens: int  # per optimizer step


_SCALES = (
    _Scale(2e7, lr=1e-3, anchor_weight=0.1, tokens=1 << 12),
    _Scale(5e8, lr=6e-4, anchor_weight=0.1, tokens=1 << 16),
    _Scale(1e9, lr=3e-4, anchor_weight=0.1, tokens=1 << 17),
    _Scale(math.inf, lr=1e-4, anchor_weight=0.01, tokens=1 << 17),
)


def job_of(request: Request, model: nn.Module) -> TaperJob:
    """Return the settings that define the numbers of a run, without text and base model.

    Raises:
        UserError: --context exceeds the context of the model.
    """
    scale = next(scale for scale in _SCALES if parameter_count(model) <= scale.parameters)
    context = request.context or min(context_of(model), _CONTEXT)
    if context > context_of(model):
        raise UserError(f"--context {context} exceeds the context {context_of(model)} of the model: give that or less")
    lr, steps, levelled = request.lr or scale.lr, request.steps, request.level_weight > 0
    window = _window(steps)
    batch = request.batch or max(1, scale.tokens // context)
    return TaperJob(
        seed=request.seed,
        context=context,
        steps=steps,
        lr=lr,
        min_lr=lr / 10,
        warmup_steps=max(1, round(0.05 * steps)),
        decay_steps=steps,
        batch=batch,
        train=FinetuneConfig(
            betas=(0.9, 0.95),
            adam_eps=1e-8,
            weight_decay=0.01,
            clip_norm=1.0,
            precision=request.precision or ("bf16" if pick_device(request.device).type == "cuda" else "float32"),
            ema_rate=0.1,
            log_every=max(1, steps // 100),
            eval_every=0,
        ),
        aux_weight=0.0
        if levelled or request.keep_norms
        else scale.anchor_weight,  # the level loss replaces the scale loss
        taper=None if request.keep_norms else window,
        micro_batch=micro_batch_of(request, batch, context) if levelled else None,  # without levels, a hardware setting
        final=request.final,
        sites=request.sites,
        level_weight=request.level_weight,
        levels_fixed_at=window.start if request.keep_norms and levelled else None,
    )


def micro_batch_of(request: Request, batch: int, context: int) -> int:
    """Return the rows per forward pass."""
    return min(batch, request.micro_batch or max(1, _MICRO_TOKENS // context))


def _window(steps: int) -> TaperWindow:
    return TaperWindow(start=max(1, round(0.1 * steps)), end=max(2, round(0.7 * steps)))
