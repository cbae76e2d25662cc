"""The config of a base model: refused before any weight is read, where no model can be built or trained from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..architectures import ARCHITECTURES
from ..util.atomic_files import read_json
from ..util.errors import UserError, one_line
from . import store
from .stock_form import DISARMED_EPS, eps_field

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_QUANTISED = ("quantization_config", "compression_config")
_PICKLES = ("pytorch_model*.bin", "model*.bin", "*.pt", "*.pth", "*.ckpt")
_ATTENTION = ("eager", "sdpa")  # what needs neither a package nor a certain device
_MISREAD = (ValueError, TypeError, KeyError, AttributeError)  # what a wrong field meets in a config's class
_UNBUILDABLE = (*_MISREAD, AssertionError, ArithmeticError, ImportError, IndexError, RuntimeError)  # or a model's


class UnusableWeights(UserError):
    """The weights of a model are there, and no run can use them."""


def read_config(folder: Path) -> tuple[type, Any]:
    """Class and config of the model of transformers in `folder`."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    _refuse_other_folders(folder)
    if not (folder / _CONFIG).is_file():
        raise UserError(f"cannot read a config of transformers in {folder}: it holds no {_CONFIG}{_ggufs_of(folder)}")
    raw = read_json(folder / _CONFIG)
    _require_plain(raw, folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, StrictDataclassError, *_MISREAD) as error:
        raise UserError(f"cannot read a config of transformers in {folder}: {_why(error, raw)}") from None
    kind = _class_of(raw, config, folder)
    _settle(config)
    build(kind, config, folder)
    return kind, config


def _require_plain(raw: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError where a config that was read in `folder` asks for what cannot be trained or does not exist."""
    if (field := next((field for field in _QUANTISED if raw.get(field) is not None), None)) is not None:
        method = raw[field].get("quant_method", "unknown") if isinstance(raw[field], dict) else "unknown"
        raise UserError(
            f"{folder} holds quantised weights ({field}, method {method}), which cannot be trained or folded: give the "
            "model that they were made from"
        )
    if isinstance(dtype := raw.get("dtype"), str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UserError(f"the config of {folder} has dtype {dtype!r}, which torch does not have: write float32")


def _settle(config: Any) -> None:
    """Take out of `config` what says how a model runs, and not what it computes.

    An attention kernel that needs a package or a certain device gives way to the model's own: flash_attention_2 and its
    like compute what that does, but for rounding. Outputs are objects and no tuples.
    """
    if config._attn_implementation not in _ATTENTION:
        config._attn_implementation = None
    config.return_dict = True


def require_norms(config: Any, place: object) -> None:
    """Raise UserError where the norms of a model divide by a constant: its eps is far above any mean square.

    Stock exports are made like that, and published FakeLN checkpoints.
    """
    field = eps_field(config)
    if field is not None and getattr(config, field) >= DISARMED_EPS:
        raise UserError(
            f"the norms of {place} normalise nothing ({field} {getattr(config, field):.3g}), as in a stock export: "
            "give the untouched model that it was made from"
        )


def build(kind: type, config: Any, place: object) -> nn.Module:
    """The model of this class and config, without storage for its weights."""
    make: Any = kind
    try:
        with torch.device("meta"):
            model = make(config)
    except _UNBUILDABLE as error:
        reason = one_line(error, named=True)
        raise UserError(f"the config of {place} describes no {kind.__name__} ({reason}): fetch it again") from None
    model.tie_weights()
    return model


def _refuse_other_folders(folder: Path) -> None:
    """Raise UserError where `folder` holds a model of ours, an adapter, or weights that only a pickle holds."""
    if store.is_ours(folder):
        raise UserError(f"{folder} was written by tapernorm: give the untouched model that it was made from")
    if (folder / _ADAPTER).is_file():
        base = read_json(folder / _ADAPTER).get("base_model_name_or_path", "its base")
        raise UserError(
            f"{folder} holds an adapter of {base} ({_ADAPTER}) and no whole model: merge it first (PEFT's "
            "merge_and_unload, then save_pretrained), and give that folder"
        )
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    of_the_hub = folder.parent.name == "snapshots"  # more of it may still be fetched
    if pickles and not of_the_hub and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder} holds its weights as pickles alone ({pickles[0]}), which are not read because they can run "
            "code: save them as safetensors (from_pretrained, then save_pretrained) and give that folder"
        )


def _why(error: Exception, raw: Mapping[str, Any]) -> str:
    """What is wrong with a config that cannot be read."""
    if raw.get("auto_map"):
        kind = raw.get("model_type")
        return f"its model_type {kind!r} is code of its own (auto_map), and code that lies beside weights is never run"
    return one_line(error)


def _ggufs_of(folder: Path) -> str:
    files = ", ".join(path.name for path in sorted(folder.glob("*.gguf")))
    return f" (a GGUF file is given by its own path, and there is {files})" if files else ""


def _class_of(raw: Mapping[str, Any], config: Any, folder: Path) -> type:
    import transformers

    known = [name for name, arch in ARCHITECTURES.items() if arch.hugging_face]
    named = raw.get("architectures") or ["(none named)"]
    if not isinstance(named, list):
        raise UserError(f"{folder}/{_CONFIG} has architectures {named!r}, and a list is needed: write [{named!r}]")
    if named[0] not in known:
        raise UserError(f"{folder} holds a {named[0]}; known: {', '.join(sorted(known))}")
    kind = getattr(transformers, named[0])
    if not isinstance(config, kind.config_class):
        raise UserError(
            f"{folder}/{_CONFIG} has the architecture {named[0]} and model_type {config.model_type!r}: they are not of "
            "one model; fetch it again"
        )
    return kind
