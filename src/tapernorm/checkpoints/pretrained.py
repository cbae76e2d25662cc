"""Models of transformers from the hub, a folder or a GGUF file, of any class in `tapernorm.architectures`.

Weights are read from safetensors or from the GGUF file. Code beside them is never run. A `source` below is such a
folder or file.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from ..architectures import has_tied_head
from ..util.atomic_files import sha256_of
from ..util.errors import UserError, one_line
from ..util.hashing import digest
from ..util.progress import announced
from .base_config import UnusableWeights, build, read_config, require_norms
from .gguf import config_of_gguf, is_gguf, licence_of_gguf, load_gguf
from .tokenizer_files import TOKENIZER_FILES

_SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "README.md")  # files of a hub repository other than weights
_IGNORED = (".attn.masked_bias", ".attn.bias", "rotary_emb.inv_freq")  # buffers in old files


def find(source: str | Path, *, weights: bool = True) -> Path:
    """Return the folder or GGUF file of a model: `source` itself, or a local copy of the hub repository of that name.

    Args:
        source: a folder, a GGUF file, or the name of a hub repository.
        weights: whether to download the weights too, and not just the small files.

    Raises:
        UserError: there is no such folder or file, and the hub does not provide one.
    """
    here = Path(source).expanduser()
    if here.is_dir() or (is_gguf(here) and here.is_file()):
        return here
    if is_gguf(here):
        raise UserError(f"there is no file {here}: give the path of a local GGUF file")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(str(source), allow_patterns=[*_SMALL, *(["*.safetensors"] if weights else [])]))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"no model {str(source)!r}: it is not a folder, and the hub does not provide it ({reason}). Give a folder "
            "with config.json and model.safetensors, a .gguf file, or a hub name with a network connection"
        ) from None


def commit_of(folder: Path) -> str | None:
    """Return the hub revision of which `folder` is a copy, or None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def licence_of(source: Path) -> str | None:
    """Return the licence that the model card in a folder states, or a GGUF file itself, or None."""
    if is_gguf(source):
        return licence_of_gguf(source)
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        told = metadata_load(source / "README.md") or {}
    except (OSError, ValueError, YAMLError):
        return None
    return str(told["license"]) if told.get("license") else None


def model_digest(source: Path) -> str:
    """Return one digest of the config and all weight files in a folder, or the sha256 of a GGUF file."""
    if is_gguf(source):
        return sha256_of(source)
    files = sorted([source / "config.json", *source.glob("*.safetensors")])
    return digest({path.name: sha256_of(path) for path in files})


def tokenizer_digest(source: Path) -> str:
    """Return one digest of the tokenizer files in a folder, or the sha256 of a GGUF file."""
    if is_gguf(source):
        return sha256_of(source)
    return digest({name: sha256_of(source / name) for name in TOKENIZER_FILES if (source / name).is_file()})


def config_of(source: Path) -> tuple[type, Any]:
    """Return class and config of the model in `source`."""
    return config_of_gguf(source) if is_gguf(source) else read_config(source)


@announced("loading a model")
def load_pretrained(source: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Load the model in `source`, in eval mode.

    Raises:
        UserError: its class is unknown, or its weights are missing, damaged or not finite, or do not fit the config.
    """
    model = load_gguf(source, dtype) if is_gguf(source) else _load_weights(*config_of(source), source, dtype)
    require_finite(model, source)
    return model.eval()


def _load_weights(kind: type, config: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """Load a model of this class and config with the weights in `folder`."""
    loader: Any = kind
    try:
        model, info = loader.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, with names
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise UnusableWeights(f"the weights of {folder} are damaged ({error}): fetch or write them again") from None
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot read the weights in {folder}: {reason} (safetensors are needed)") from None
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        said = one_line(error, named=True)
        raise UserError(f"cannot load {folder} ({said}): correct config.json or generation_config.json") from error
    faults = {name: sorted(map(str, info[name])) for name in ("missing_keys", "mismatched_keys", "unexpected_keys")}
    faults["unexpected_keys"] = [key for key in faults["unexpected_keys"] if not key.endswith(_IGNORED)]
    if any(faults.values()):
        found = "; ".join(f"{name.replace('_', ' ')}: {', '.join(keys)}" for name, keys in faults.items() if keys)
        raise UnusableWeights(f"the weights of {folder} do not fit its config: {found}")
    if config.tie_word_embeddings and not has_tied_head(model):
        raise UnusableWeights(
            f"{folder} declares a tied head and holds another weight for it: set tie_word_embeddings to false"
        )
    return model


def require_finite(model: nn.Module, place: object) -> None:
    """Raise UnusableWeights if a weight or buffer of `model`, read from `place`, is not finite."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool((finite := tensor.isfinite()).all()):
            bad = int((~finite).sum())
            raise UnusableWeights(
                f"{name} of {place} holds {bad:,} values of {tensor.numel():,} that are not finite (NaN or infinity), "
                "which training cannot repair: fetch the model again, or take another one"
            )


def skeleton(source: Path) -> nn.Module:
    """Build the model that the config in `source` describes, without storage for weights, as a base to taper.

    Raises:
        UserError: its class is unknown, or its norms do not normalise.
    """
    made, config = config_of(source)
    require_norms(config, source)
    return build(made, config, source)
