"""Wrappers around an attached model: those that would lose gradients or statistics are refused in the first pass."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..calibrate import RunningMean
from .errors import UserError

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # where DistributedDataParallel looks for names, in the model


def keep_from_broadcast(model: nn.Module) -> None:
    """Keep DistributedDataParallel from giving every rank the sums of rank 0, which are to be added up over the ranks.

    It broadcasts the buffers of a model before a forward pass, between the micro-batches of one step too.
    """
    setattr(model, _IGNORED, [*getattr(model, _IGNORED, ()), *_sums(model)])


def undo_keep_from_broadcast(model: nn.Module) -> None:
    """Take back what `keep_from_broadcast` has said of `model`."""
    others = set(model.__dict__.pop(_IGNORED, ())) - set(_sums(model))
    if others:
        setattr(model, _IGNORED, sorted(others))


def _sums(model: nn.Module) -> list[str]:
    running = [name for name, module in model.named_modules() if isinstance(module, RunningMean)]
    return [f"{name}.{part}" for name in running for part in ("sums", "count")]


def refuse_wrapper(trunk: nn.Module) -> None:
    """Raise UserError in a training pass under a wrapper that tapered norms do not work in.

    One of a tapered norm's two gains has no gradient at g = 1 and at g = 0: plain DistributedDataParallel would stop.
    """
    if torch.compiler.is_compiling() or not (trunk.training and torch.is_grad_enabled()):
        return
    if getattr(trunk, "_is_replica", False):
        raise UserError(
            "nn.DataParallel loses the statistics of all replicas but one: use DistributedDataParallel (torchrun), or "
            "show the process one device (CUDA_VISIBLE_DEVICES=0)"
        )
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None or (wrapper.find_unused_parameters and not wrapper.static_graph):
        return
    if any(parameter.requires_grad for name, parameter in trunk.named_parameters() if name.endswith("gamma_t")):
        raise UserError(
            "a tapered norm trains two gains, one of which has no gradient at g = 1 and at g = 0: wrap the model in "
            "DistributedDataParallel(model, find_unused_parameters=True) and without static_graph; in the Trainer, "
            "ddp_find_unused_parameters=True"
        )
