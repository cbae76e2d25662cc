"""What the recipe would do with a model: its norms, what each folds into, and the settings."""

from collections.abc import Iterator

from torch import nn

from .arch import architecture_of, select_norms
from .models.llama import parameter_count
from .norms import is_norm
from .pretrained import find, skeleton
from .request import Request, form_of, hardware_of, job_of
from .stock import why_not_stock


def outline(request: Request) -> str:
    """What `taper_model` would do: a table of norms, consumers and parameters, and the settings. Nothing is trained.

    Raises:
        UserError: there is no such model, or it is not known here.
    """
    model = skeleton(find(request.model, weights=False))
    job, hardware = job_of(request, model), hardware_of(request, model)
    assert job.taper is not None  # every job of the recipe has one
    tapered = select_norms(model, final=request.final, sites=None)
    reason = why_not_stock(model, set(tapered))
    return "\n".join(
        [
            *_aligned([("norm", "parameters", "becomes", "folds into"), *_rows(model, tapered)]),
            "",
            f"{type(model).__name__}, {parameter_count(model):,} parameters; {len(tapered)} norms go",
            f"{job.steps} steps of {job.batch} rows of {job.context} tokens, {hardware.micro_batch} at a time, "
            f"{job.train.precision}",
            f"peak learning rate {job.lr:g}; scale loss {job.aux_weight:g}; the gate falls from step {job.taper.start} "
            f"to {job.taper.end}",
            f"export: {form_of(request, model)}" + (f"; no stock form: {reason}" if reason else ""),
        ]
    )


def _rows(model: nn.Module, tapered: list[str]) -> Iterator[tuple[str, ...]]:
    arch = architecture_of(model)
    for name, module in model.named_modules():
        if is_norm(module):
            folded = ("linear", ", ".join(arch.consumers(name))) if name in tapered else ("kept", "")
            yield name, f"{parameter_count(module):,}", *folded


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
