"""The check that torch.compile has a compiler."""

import shutil

import torch

from .errors import UserError


def has_compiler(device: torch.device) -> bool:
    """Return whether torch.compile can build code for `device`. A CPU needs a C++ compiler."""
    return device.type == "cuda" or any(map(shutil.which, ("g++", "clang++", "c++")))


def require_compiler(device: torch.device) -> None:
    """Raise UserError if torch.compile cannot build code for `device`."""
    if not has_compiler(device):
        raise UserError("torch.compile needs a C++ compiler on a CPU: install g++, or set compile to false")
