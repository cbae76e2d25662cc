"""From options to what will be done: the one place that reads a request beside the model that it names."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from tapernorm.architectures import select_norms
from tapernorm.checkpoints.pretrained import find, skeleton
from tapernorm.checkpoints.stock_form import why_not_stock
from tapernorm.export import FORMS, Form
from tapernorm.models.decoder import parameter_count
from tapernorm.util.errors import UserError

from ..config.sections import HardwareConfig
from .job import TaperJob, job_of, micro_batch_of
from .options import Request, Texts, require_output


@dataclass(frozen=True)
class TaperRun:
    """What `tapernorm taper` will do. Dry run, run, export and messages read this, and no option again.

    Attributes:
        source: what the user calls the model: a folder, a GGUF file or a hub name.
        base: its folder or file on this machine, known before its weights are.
        skeleton: the model without storage for its weights.
        tapered: full names of the norms that go; none in a control.
        job: exactly what defines the numbers, model and text apart.
        hardware: what the run runs on; no number depends on it but for rounding.
        texts: what is trained on, and what is scored.
        forms: of the export, in the order in which they are tried; none for a control.
        not_stock: why the model has no stock form; None where it has one.
        out: the run folder.
        overwrite: delete another job's output in `out`.
    """

    source: str
    base: Path
    skeleton: nn.Module
    tapered: tuple[str, ...]
    job: TaperJob
    hardware: HardwareConfig
    texts: Texts
    forms: tuple[Form, ...]
    not_stock: str | None
    out: Path
    overwrite: bool


def resolve(request: Request, texts: Texts) -> TaperRun:
    """Decide all that follows from a request and the config of its model; no weight is read, none is downloaded.

    Args:
        texts: those that `check` found for this request.

    Raises:
        UserError: there is no such model, or it cannot be tapered, exported or run as asked; or the output folder is no
            place for a run.
    """
    require_output(request)
    base = find(request.model, weights=False)
    model = skeleton(base)
    job = job_of(request, model)
    tapered = () if request.keep_norms else select_norms(model, final=request.final, sites=request.sites)
    not_stock = why_not_stock(model, set(tapered))
    run = TaperRun(
        source=request.model,
        base=base,
        skeleton=model,
        tapered=tuple(tapered),
        job=job,
        hardware=_hardware(request, job, model),
        texts=texts,
        forms=() if request.keep_norms else _forms(request, not_stock),
        not_stock=not_stock,
        out=request.out,
        overwrite=request.overwrite,
    )
    if base == Path(request.model).expanduser() and not has_weights(base):
        raise UserError(f"{base} holds no weights (*.safetensors): fetch or save them there")
    for text in texts.repeated:
        print(f"{text} is given more than once: it counts once", file=sys.stderr)
    return run


def has_weights(base: Path) -> bool:
    """Whether the weights of a model lie beside its config, or in its file."""
    return base.is_file() or any(base.glob("*.safetensors"))


def _hardware(request: Request, job: TaperJob, model: nn.Module) -> HardwareConfig:
    return HardwareConfig(
        device=request.device,
        threads=request.threads or os.cpu_count() or 1,
        linear=request.linear,
        compile=False,
        micro_batch=job.micro_batch or micro_batch_of(request, job.batch, job.context),
        checkpoint_every=max(10, job.steps // 10),
        tensorboard=False,
        activation_checkpointing=parameter_count(model) > 1e9,
        jobs_per_gpu=1,
        devices_per_job=1,
    )


def _forms(request: Request, not_stock: str | None) -> tuple[Form, ...]:
    """The form that was asked for, else stock where the model has it; then the other."""
    if request.form == "stock" and not_stock is not None:
        raise UserError(
            f"--form stock: {not_stock}; take --form normfree, or --final where only the final norm is kept"
        )
    first = request.form or (FORMS[0] if not_stock is None else FORMS[1])
    return (first, *(form for form in FORMS if form != first))
