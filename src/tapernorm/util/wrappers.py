"""Checks of wrappers around an attached model. Its first training pass refuses those that lose statistics or fail."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..calibrate import RunningMean
from .errors import UserError

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # attribute that DistributedDataParallel reads from the model


def keep_from_broadcast(model: nn.Module) -> None:
    """Exclude the sums of statistics from the buffers that DistributedDataParallel broadcasts from rank 0.

    Each rank adds to sums of its own, and the update adds these over the ranks. DistributedDataParallel broadcasts
    before each forward pass, also between the micro-batches of a step.
    """
    setattr(model, _IGNORED, [*getattr(model, _IGNORED, ()), *_sums(model)])


def undo_keep_from_broadcast(model: nn.Module) -> None:
    """Undo `keep_from_broadcast`."""
    others = set(model.__dict__.pop(_IGNORED, ())) - set(_sums(model))
    if others:
        setattr(model, _IGNORED, sorted(others))


def _sums(model: nn.Module) -> list[str]:
    running = [name for name, module in model.named_modules() if isinstance(module, RunningMean)]
    return [f"{name}.{part}" for name in running for part in ("sums", "count")]


def refuse_wrapper(trunk: nn.Module) -> None:
    """Raise UserError in a training pass under a wrapper that does not support tapered norms.

    At g = 1 and at g = 0, one of a tapered norm's two gains has no gradient. Plain DistributedDataParallel fails then.
    """
    if torch.compiler.is_compiling() or not (trunk.training and torch.is_grad_enabled()):
        return
    if getattr(trunk, "_is_replica", False):
        raise UserError(
            "nn.DataParallel loses the statistics of all replicas but one: use DistributedDataParallel (torchrun), or "
            "limit the process to one device (CUDA_VISIBLE_DEVICES=0)"
        )
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None or (wrapper.find_unused_parameters and not wrapper.static_graph):
        return
    if any(parameter.requires_grad for name, parameter in trunk.named_parameters() if name.endswith("gamma_t")):
        raise UserError(
            "a tapered norm has two gains, one of which gets no gradient at g = 1 and at g = 0: use "
            "DistributedDataParallel(model, find_unused_parameters=True) without static_graph, or "
            "ddp_find_unused_parameters=True in the Trainer"
        )
