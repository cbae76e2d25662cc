"""Turn a request into decisions: the only module that reads the request together with its model."""

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
    """All decisions of one `tapernorm taper`. Dry run, run, export and messages read them here.

    Attributes:
        source: --model as typed: a folder, a GGUF file or a hub name.
        base: the folder or file of the model on this machine; its weights may still be missing.
        skeleton: the model without storage for its weights.
        tapered: full names of the norms to taper; empty for a control.
        job: the settings that define the numbers, without model and text.
        hardware: device, threads and micro-batch; numbers depend on it only by rounding.
        texts: the texts to train on and to score.
        forms: forms of the export, in the order of the attempts; empty for a control.
        not_stock: why the model has no stock form; None if it has one.
        out: the run folder.
        overwrite: delete the output of another job in `out`.
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
    """Decide everything that follows from a request and the config of its model. No weight is read or downloaded.

    Args:
        texts: the texts that `check` returned for this request.

    Raises:
        UserError: the model does not exist, or cannot be tapered or exported as the request says; or the run may not
            write into --out.
    """
    require_output(request)
    base = find(request.model, weights=False)
    model = skeleton(base)
    job = job_of(request, model)
    chosen = select_norms(model, final=request.final, sites=request.sites)
    tapered = () if request.keep_norms else chosen
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
        raise UserError(f"--model {base} holds no weights (*.safetensors): save or download them there")
    for text in texts.repeated:
        print(f"{text} is given more than once, and is used once", file=sys.stderr)
    return run


def has_weights(base: Path) -> bool:
    """Whether the weights of a model are on this machine, beside its config or in its GGUF file."""
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
    """Return both forms, first the one of --form, or by default stock if the model has that form."""
    if request.form == "stock" and not_stock is not None:
        raise UserError(
            f"--form stock: {not_stock}; give --form normfree, or add --final if only the final norm is kept"
        )
    first = request.form or (FORMS[0] if not_stock is None else FORMS[1])
    return (first, *(form for form in FORMS if form != first))
