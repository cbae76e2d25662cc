"""Checks of a model whose norms are to be replaced. Each function refuses before anything changes."""

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from numbers import Real

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .architectures import architecture_of
from .linear_maps import is_linear
from .schedule import GateSchedule
from .util.errors import UserError

_CONTAINERS = (dict, set)  # the types in which a module keeps parameters, buffers, submodules and hooks


def require_attachable(model: nn.Module, names: Sequence[str]) -> None:
    """Raise UserError if the norms `names` of `model` cannot be tapered and folded.

    Warn if `fold(model)` will refuse a linear map that they feed. `fold(model, fused=False)` accepts it.
    """
    _require_storage(model)
    arch = architecture_of(model)
    consumers = list(dict.fromkeys(consumer for name in names for consumer in arch.consumers(name)))
    require_apart(model, names)
    require_own_weights(model, [*names, *consumers])
    places = _places(model)
    unfit = [told for name in consumers if (told := _why_unfit(name, model.get_submodule(name), places))]
    if unfit:
        more = f" (and {len(unfit) - 1} more)" if len(unfit) > 1 else ""
        warnings.warn(
            f"{unfit[0]}{more}: fold(model) will refuse this model; use fold(model, fused=False), which accepts it",
            stacklevel=4,
        )


def require_apart(model: nn.Module, names: Iterable[str]) -> None:
    """Raise UserError if one of the norms `names` is used at another place of `model` too."""
    places = _places(model)
    for name in names:
        if len(found := places[id(model.get_submodule(name))]) > 1:
            raise UserError(
                f"{' and '.join(found)} are one module, and each place needs a constant c of its own: give each place "
                "its own module (copy.deepcopy)"
            )


def _why_unfit(name: str, layer: nn.Module, places: dict[int, list[str]]) -> str | None:
    """Return why no norm can be folded into `layer`, for instance because it is quantised. None: it can."""
    if not is_linear(layer):
        return f"{name} is a {type(layer).__name__}, not an nn.Linear or Conv1D"
    others = [other for other in places[id(layer)] if other != name]
    return f"{name} is the same module as {' and '.join(others)}" if others else None


def require_own_weights(model: nn.Module, names: Collection[str]) -> None:
    """Raise UserError if the weight or bias of a module in `names` is recomputed in each forward pass.

    A parametrization does that, and so do the forward pre-hooks of pruning, weight_norm and spectral_norm. Such a
    pre-hook is refused in every module of `model`, because it prevents a deep copy.
    """
    for name, module in chain(((name, model.get_submodule(name)) for name in names), model.named_modules()):
        for part in ("weight", "bias"):
            hooked = isinstance(module.__dict__.get(part), Tensor)
            if hooked or (name in names and is_parametrized(module, part)):
                raise UserError(
                    f"{name}.{part} is not a parameter, and no norm can be folded into it: a "
                    f"{'forward pre-hook' if hooked else 'parametrization'} (pruning, weight_norm, spectral_norm) "
                    "recomputes it in each pass. Make it permanent first: torch.nn.utils.prune.remove, "
                    "remove_weight_norm, remove_spectral_norm or parametrize.remove_parametrizations"
                )


def require_options(*, schedule: object, ema_rate: float, **weights: float) -> None:
    """Raise UserError if an argument of `attach` is out of range. `weights` maps names of loss weights to values."""
    if not isinstance(schedule, GateSchedule | None):
        raise UserError(f"schedule must be a GateSchedule(start, end), got {schedule!r}")
    if not (_is_number(ema_rate) and 0 < ema_rate <= 1):
        raise UserError(f"ema_rate must lie in (0, 1], got {ema_rate!r}: it is the weight of one step in the EMA")
    for name, value in weights.items():
        if not (_is_number(value) and math.isfinite(value) and value >= 0):
            raise UserError(f"{name} must be a finite number >= 0, got {value!r}: 0 leaves that loss out")


@contextmanager
def unchanged_on_error(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore classes and attributes of `modules` if an exception is raised inside."""
    before = [(m, m.__class__, dict(m.__dict__), _contents(m)) for m in dict.fromkeys(modules)]
    try:
        yield
    except BaseException:
        for module, kind, members, contents in before:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(members)
            for name, content in contents.items():
                container = members[name]  # the same object, because the handles of hooks refer to it
                container.clear()
                container.update(content)
        raise


def _require_storage(model: nn.Module) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise UserError(f"{name} is on the meta device and has no values: load the weights, then attach")


def _places(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each module, by the module's id."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), []).append(name)
    return found


def _contents(module: nn.Module) -> dict[str, dict | set]:
    return {name: value.copy() for name, value in module.__dict__.items() if isinstance(value, _CONTAINERS)}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
