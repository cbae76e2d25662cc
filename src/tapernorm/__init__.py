"""Gated removal of normalization from pre-norm Transformers (TaperNorm, arXiv 2602.10408v2).

Importing the package is instant and imports no torch; each name below loads its module on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import export, interop, spread
    from .export import load
    from .folding import FoldReport, fold
    from .interop.hf_trainer import TaperCallback
    from .linear_kernel import get_linear_kernel, set_linear_kernel
    from .models.decoder import Decoder
    from .norms import LayerNorm, RMSNorm
    from .schedule import GateSchedule, gate_at, lr_at
    from .taper import Taper, attach
    from .util.errors import UserError

_HOME = {
    "Decoder": "models.decoder",
    "FoldReport": "folding",
    "GateSchedule": "schedule",
    "LayerNorm": "norms",
    "RMSNorm": "norms",
    "Taper": "taper",
    "TaperCallback": "interop.hf_trainer",
    "UserError": "util.errors",
    "attach": "taper",
    "fold": "folding",
    "gate_at": "schedule",
    "get_linear_kernel": "linear_kernel",
    "load": "export",
    "lr_at": "schedule",
    "set_linear_kernel": "linear_kernel",
}
_MODULES = ("export", "interop", "spread")
__all__ = [
    "Decoder",
    "FoldReport",
    "GateSchedule",
    "LayerNorm",
    "RMSNorm",
    "Taper",
    "TaperCallback",
    "UserError",
    "attach",
    "export",
    "fold",
    "gate_at",
    "get_linear_kernel",
    "interop",
    "load",
    "lr_at",
    "set_linear_kernel",
    "spread",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'tapernorm' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
