"""Whether torch.compile can work here."""

import shutil

import torch

from .errors import UserError


def has_compiler(device: torch.device) -> bool:
    """Whether torch.compile can build code here: on a CPU it needs a C++ compiler."""
    return device.type == "cuda" or any(map(shutil.which, ("g++", "clang++", "c++")))


def require_compiler(device: torch.device) -> None:
    """Raise UserError where torch.compile cannot work."""
    if not has_compiler(device):
        raise UserError("torch.compile needs a C++ compiler on a CPU: install g++, or leave compile off")
