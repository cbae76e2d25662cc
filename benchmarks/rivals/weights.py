"""A checkpoint of a `Decoder` as NumPy arrays, for engines without PyTorch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


@dataclass(frozen=True)
class Weights:
    """The config of a model and its tensors. Linear maps are (out, in)."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]


def read_weights(folder: Path) -> Weights:
    """Read config and tensors of the checkpoint in `folder`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["config"]
    return Weights(config, load_file(folder / "model.safetensors"))
