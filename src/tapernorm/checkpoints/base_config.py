"""The config of a base model. One from which no model can be built or trained is refused before weights are read."""

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
_ATTENTION = ("eager", "sdpa")  # implementations that need neither a package nor a certain device
_MISREAD = (ValueError, TypeError, KeyError, AttributeError)  # raised by a config's class for a wrong field
_UNBUILDABLE = (
    *_MISREAD,
    AssertionError,
    ArithmeticError,
    ImportError,
    IndexError,
    RuntimeError,
)  # by a model's class


class UnusableWeights(UserError):
    """The error for weights that exist but that no run can use."""


def read_config(folder: Path) -> tuple[type, Any]:
    """Return class and config of the transformers model in `folder`.

    Raises:
        UserError: there is no readable config, or its class is unknown. The model is an adapter, quantised or pickled.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    _refuse_other_folders(folder)
    if not (folder / _CONFIG).is_file():
        raise UserError(f"cannot read a config of transformers in {folder}: it has no {_CONFIG}{_ggufs_of(folder)}")
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
    """Raise UserError if the config in `folder` declares quantised weights or an unknown dtype."""
    if (field := next((field for field in _QUANTISED if raw.get(field) is not None), None)) is not None:
        method = raw[field].get("quant_method", "unknown") if isinstance(raw[field], dict) else "unknown"
        raise UserError(
            f"{folder} holds quantised weights ({field}, method {method}), which cannot be trained or folded: give the "
            "unquantised model"
        )
    if isinstance(dtype := raw.get("dtype"), str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UserError(f"the config of {folder} has dtype {dtype!r}, which torch does not know: set it to float32")


def _settle(config: Any) -> None:
    """Replace settings of `config` that say how a model runs and not what it computes.

    An attention kernel that needs a package or a certain device is replaced by the default one. Kernels such as
    flash_attention_2 compute the same up to rounding. Outputs become objects instead of tuples.
    """
    if config._attn_implementation not in _ATTENTION:
        config._attn_implementation = None
    config.return_dict = True


def require_norms(config: Any, place: object) -> None:
    """Raise UserError if the norms of a model divide by a constant, because its eps is far above any mean square.

    Stock exports have such an eps, and so do published FakeLN checkpoints.
    """
    field = eps_field(config)
    if field is not None and getattr(config, field) >= DISARMED_EPS:
        raise UserError(
            f"the norms of {place} do not normalise ({field} {getattr(config, field):.3g}), as in a stock export: give "
            "the original model"
        )


def build(kind: type, config: Any, place: object) -> nn.Module:
    """Build the model of class `kind` from `config` on the meta device, without storage for weights.

    Raises:
        UserError: the class cannot be built from this config. `place` names the config in the message.
    """
    make: Any = kind
    try:
        with torch.device("meta"):
            model = make(config)
    except _UNBUILDABLE as error:
        reason = one_line(error, named=True)
        raise UserError(
            f"cannot build a {kind.__name__} from the config of {place} ({reason}): correct it, or fetch it again"
        ) from None
    model.tie_weights()
    return model


def _refuse_other_folders(folder: Path) -> None:
    """Raise UserError if `folder` holds a model saved by tapernorm, an adapter, or weights in pickles alone."""
    if store.is_ours(folder):
        raise UserError(f"{folder} was written by tapernorm: give the original model")
    if (folder / _ADAPTER).is_file():
        base = read_json(folder / _ADAPTER).get("base_model_name_or_path", "its base")
        raise UserError(
            f"{folder} holds an adapter of {base} ({_ADAPTER}) and no complete model: merge it first (PEFT's "
            "merge_and_unload, then save_pretrained), and give the folder of the merged model"
        )
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    of_the_hub = folder.parent.name == "snapshots"  # safetensors may be downloaded later
    if pickles and not of_the_hub and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder} holds weights as pickles alone ({pickles[0]}), which tapernorm does not read because they can "
            "run code: save them as safetensors (from_pretrained, then save_pretrained) and give that folder"
        )


def _why(error: Exception, raw: Mapping[str, Any]) -> str:
    """Return why a config cannot be read."""
    if raw.get("auto_map"):
        kind = raw.get("model_type")
        return f"its model_type {kind!r} needs code of its own (auto_map), and tapernorm never runs code beside weights"
    return one_line(error)


def _ggufs_of(folder: Path) -> str:
    files = ", ".join(path.name for path in sorted(folder.glob("*.gguf")))
    return f" (it has {files}: give the path of a GGUF file itself)" if files else ""


def _class_of(raw: Mapping[str, Any], config: Any, folder: Path) -> type:
    import transformers

    known = [name for name, arch in ARCHITECTURES.items() if arch.hugging_face]
    named = raw.get("architectures") or ["(none named)"]
    if not isinstance(named, list):
        raise UserError(f"{folder}/{_CONFIG} has architectures {named!r}, which must be a list: write [{named!r}]")
    if named[0] not in known:
        raise UserError(f"{folder} holds a {named[0]}, which is not supported; known: {', '.join(sorted(known))}")
    kind = getattr(transformers, named[0])
    if not isinstance(config, kind.config_class):
        raise UserError(
            f"{folder}/{_CONFIG} has the architecture {named[0]} and model_type {config.model_type!r}, which do not "
            "belong together: correct it, or fetch it again"
        )
    return kind
