"""A checkpoint of our decoder as NumPy arrays, for engines that know no PyTorch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


@dataclass(frozen=True)
class Weights:
    """The shape of a model and its tensors, each linear map (out, in)."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]


def read_weights(folder: Path) -> Weights:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["config"]
    return Weights(config, load_file(folder / "model.safetensors"))
