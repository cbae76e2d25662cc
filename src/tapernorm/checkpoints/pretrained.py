"""A model of transformers, from the hub or a folder: any class that `tapernorm.architectures` knows.

Weights come from safetensors, or with all else out of one GGUF file; code that lies beside them is never run. A
`source` is such a folder or such a file.
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

_SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "README.md")  # of a repository of the hub: all but weights
_IGNORED = (".attn.masked_bias", ".attn.bias", "rotary_emb.inv_freq")  # buffers that old files hold


def find(source: str | Path, *, weights: bool = True) -> Path:
    """The folder or GGUF file of a model: `source` itself, or the local copy of the hub's repository of that name.

    Args:
        weights: bring them too; else what is small.

    Raises:
        UserError: there is no such folder or file, and the hub gives none.
    """
    here = Path(source).expanduser()
    if here.is_dir() or (is_gguf(here) and here.is_file()):
        return here
    if is_gguf(here):
        raise UserError(f"there is no file {here}: give the path of a GGUF file that lies here")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(str(source), allow_patterns=[*_SMALL, *(["*.safetensors"] if weights else [])]))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"no model {str(source)!r}: it is no folder, and the hub gives none ({reason}). Give a folder with "
            "config.json and model.safetensors, a .gguf file, or a hub name and a network that reaches it"
        ) from None


def commit_of(folder: Path) -> str | None:
    """The revision of the hub's repository that `folder` is a copy of; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def licence_of(source: Path) -> str | None:
    """What the model card there, or the file itself, says of its licence."""
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
    """One digest of the config and all weight files in a folder; the sha256 of a GGUF file."""
    if is_gguf(source):
        return sha256_of(source)
    files = sorted([source / "config.json", *source.glob("*.safetensors")])
    return digest({path.name: sha256_of(path) for path in files})


def tokenizer_digest(source: Path) -> str:
    """One digest of the tokenizer's files in a folder; the sha256 of a GGUF file."""
    if is_gguf(source):
        return sha256_of(source)
    return digest({name: sha256_of(source / name) for name in TOKENIZER_FILES if (source / name).is_file()})


def config_of(source: Path) -> tuple[type, Any]:
    """Class and config of the model in `source`."""
    return config_of_gguf(source) if is_gguf(source) else read_config(source)


@announced("loading a model")
def load_pretrained(source: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model in `source`, in eval mode.

    Raises:
        UserError: it is no base model that is known here, or its weights are missing, damaged, not finite or not what
            the config describes.
    """
    model = load_gguf(source, dtype) if is_gguf(source) else _load_weights(*config_of(source), source, dtype)
    require_finite(model, source)
    return model.eval()


def _load_weights(kind: type, config: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A model of transformers of this class and config, its weights those in `folder`."""
    loader: Any = kind
    try:
        model, info = loader.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported and refused below
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise UnusableWeights(f"the weights of {folder} are damaged ({error}): fetch or write them again") from None
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot read the weights in {folder}: {reason} (safetensors are needed)") from None
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        said = one_line(error, named=True)
        raise UserError(f"{folder} cannot be loaded ({said}): mend config.json or generation_config.json") from error
    faults = {name: sorted(map(str, info[name])) for name in ("missing_keys", "mismatched_keys", "unexpected_keys")}
    faults["unexpected_keys"] = [key for key in faults["unexpected_keys"] if not key.endswith(_IGNORED)]
    if any(faults.values()):
        found = "; ".join(f"{name.replace('_', ' ')}: {', '.join(keys)}" for name, keys in faults.items() if keys)
        raise UnusableWeights(f"the weights of {folder} do not fit its config: {found}")
    if config.tie_word_embeddings and not has_tied_head(model):
        raise UnusableWeights(
            f"{folder} says that its head is tied and holds another weight for it: set tie_word_embeddings to false"
        )
    return model


def require_finite(model: nn.Module, place: object) -> None:
    """Raise UnusableWeights where a weight or buffer of `model`, read from `place`, is not finite."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool((finite := tensor.isfinite()).all()):
            bad = int((~finite).sum())
            raise UnusableWeights(
                f"{name} of {place} holds {bad:,} values of {tensor.numel():,} that are not finite (NaN or infinity): "
                "no training mends that; fetch the model again, or take another one"
            )


def skeleton(source: Path) -> nn.Module:
    """The model that the config in `source` describes, without storage for its weights, as a base to taper.

    Raises:
        UserError: it is no base model that is known here, or its norms normalise nothing.
    """
    made, config = config_of(source)
    require_norms(config, source)
    return build(made, config, source)
