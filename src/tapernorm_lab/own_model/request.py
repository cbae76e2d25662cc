"""A request to taper a model of one's own beside that model: the settings that follow from the model's size."""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from tapernorm.architectures import context_of, select_norms
from tapernorm.checkpoints.pretrained import find, skeleton
from tapernorm.checkpoints.stock_form import why_not_stock
from tapernorm.export import FORMS, Form
from tapernorm.models.decoder import parameter_count
from tapernorm.util.errors import UserError

from ..config.gpt2 import FinetuneConfig, Method, TaperWindow
from ..config.jobs import FinetuneJob, OwnJob
from ..config.sections import HardwareConfig
from ..training.device import pick_device
from .options import (
    Request,
    Texts,
    check,
    require_output,
)

_CONTEXT = 1024  # tokens of a row, at most
_MICRO_TOKENS = 8192  # per forward pass


@dataclass(frozen=True)
class _Scale:
    """Defaults for models of up to so many parameters; beyond GPT-2's smallest, method.md section 10."""

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


@dataclass(frozen=True)
class Resolved:
    """All that is known of a request before a weight is read."""

    base: Path  # folder or GGUF file of the model
    outlined: nn.Module  # without storage for its weights
    job: FinetuneJob
    hardware: HardwareConfig
    form: Form
    texts: Texts


def resolve(request: Request, *, weights: bool = True) -> Resolved:
    """Check a request and the model that it names.

    Args:
        weights: bring the weights of a model of the hub.

    Raises:
        UserError: as `check`; there is no such model, or it cannot be tapered, exported or run as asked; or the output
            folder is no place for a run.
    """
    texts = check(request)
    require_output(request)
    base = find(request.model, weights=False)
    outlined = skeleton(base)
    job, hardware, form = job_of(request, outlined), hardware_of(request, outlined), form_of(request, outlined)
    if base == Path(request.model).expanduser() and not has_weights(base):
        raise UserError(f"{base} holds no weights (*.safetensors): fetch or save them there")
    for text in texts.repeated:
        print(f"{text} is given more than once: it counts once", file=sys.stderr)
    return Resolved(find(request.model) if weights else base, outlined, job, hardware, form, texts)


def has_weights(base: Path) -> bool:
    """Whether the weights of a model lie beside its config, or in its file."""
    return base.is_file() or any(base.glob("*.safetensors"))


def job_of(request: Request, model: nn.Module) -> FinetuneJob:
    """Exactly the settings that define the run's numbers, text and base model apart."""
    scale = next(scale for scale in _SCALES if parameter_count(model) <= scale.parameters)
    context = request.context or min(context_of(model), _CONTEXT)
    if context > context_of(model):
        raise UserError(f"--context {context} exceeds the model's {context_of(model)}: take that or less")
    lr = request.lr or scale.lr
    steps = request.steps
    job = FinetuneJob(
        method=method_of(request),
        size="own",
        seed=request.seed,
        context=context,
        steps=steps,
        lr=lr,
        min_lr=lr / 10,
        warmup_steps=max(1, round(0.05 * steps)),
        decay_steps=steps,
        batch=request.batch or max(1, scale.tokens // context),
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
        # Levels hold the scales by themselves.
        aux_weight=0.0 if request.level_weight or request.keep_norms else scale.anchor_weight,
        taper=None
        if request.keep_norms
        else TaperWindow(start=max(1, round(0.1 * steps)), end=max(2, round(0.7 * steps))),
        fakeln=None,
        micro_batch=None,
    )
    if request.sites is None and request.level_weight == 0:
        return job
    micro_batch = _micro_batch(request, job) if request.level_weight else None  # else it is the hardware's choice
    more = {"sites": request.sites, "level_weight": request.level_weight, "micro_batch": micro_batch}
    return OwnJob(**{**dict(job), **more})


def method_of(request: Request) -> Method:
    """The method that a fine-tune of this kind has in the GPT-2 track."""
    if request.keep_norms:
        return "vanilla"
    return "all_aux" if request.final else "internal_aux"


def tapered_of(request: Request, model: nn.Module) -> list[str]:
    """Full names of the norms of `model` that go."""
    return [] if request.keep_norms else select_norms(model, final=request.final, sites=request.sites)


def _micro_batch(request: Request, job: FinetuneJob) -> int:
    """Rows per forward pass."""
    return min(job.batch, request.micro_batch or max(1, _MICRO_TOKENS // job.context))


def hardware_of(request: Request, model: nn.Module) -> HardwareConfig:
    """What the run runs on; no number depends on it but for rounding, and by `micro_batch` where the job has it too."""
    job = job_of(request, model)
    return HardwareConfig(
        device=request.device,
        threads=request.threads or os.cpu_count() or 1,
        compile=False,
        micro_batch=job.micro_batch or _micro_batch(request, job),
        checkpoint_every=max(10, job.steps // 10),
        tensorboard=False,
        activation_checkpointing=parameter_count(model) > 1e9,
        jobs_per_gpu=1,
        devices_per_job=1,
    )


def form_of(request: Request, model: nn.Module) -> Form:
    """The form that was asked for; else stock where the model has it."""
    reason = why_not_stock(model, set(tapered_of(request, model)))
    if request.form == "stock" and reason is not None:
        raise UserError(f"--form stock: {reason}; take --form normfree, or --final where only the final norm is kept")
    return request.form or (FORMS[0] if reason is None else FORMS[1])
