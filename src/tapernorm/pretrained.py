"""A model of transformers as others published it, or as it lies in a folder: any class that tapernorm.arch knows.

Weights come from safetensors, or with all else out of one GGUF file; code that lies beside them is never run. A
`source` is such a folder or such a file.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from .arch import ARCHITECTURES, has_tied_head
from .errors import UserError
from .files import sha256_of
from .ggufmodel import config_of_gguf, is_gguf, licence_of_gguf, load_gguf
from .identity import digest
from .models import store

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
    card = source / "README.md"
    if not card.is_file():
        return None
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0] != "---":
        return None
    header = lines[1 : lines.index("---", 1)] if "---" in lines[1:] else []
    found = [line.partition(":")[2].strip().strip("'\"") for line in header if line.startswith("license:")]
    return found[0] if found and found[0] else None


def model_digest(source: Path) -> str:
    """One digest of the config and all weight files in a folder; the sha256 of a GGUF file."""
    if is_gguf(source):
        return sha256_of(source)
    files = sorted([source / "config.json", *source.glob("*.safetensors")])
    return digest({path.name: sha256_of(path) for path in files})


def config_of(source: Path) -> tuple[type, Any]:
    """Class and config of the model in `source`.

    Raises:
        UserError: there is no config, or it is of a model that is not known here.
    """
    if is_gguf(source):
        return config_of_gguf(source)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # of any type, by what is wrong with the file
        reason = " ".join(str(error).split())[:200]
        files = ", ".join(path.name for path in sorted(source.glob("*.gguf")))
        remedy = f" (a GGUF file is given by its own path, and there is {files})" if files else ""
        raise UserError(f"cannot read a config of transformers in {source}: {reason}{remedy}") from error
    return _class_of(config, source), config


def load_pretrained(source: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model in `source`, in eval mode.

    Raises:
        UserError: its class is not known, or its weights are missing, damaged or not what the config describes.
    """
    if is_gguf(source):
        return load_gguf(source, dtype)
    if store.is_ours(source):
        raise UserError(f"{source} was written by tapernorm: give the untouched model that it was made from")
    made, config = config_of(source)
    loader: Any = made
    try:
        model, info = loader.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported and refused below
            output_loading_info=True,
        )
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot read the weights in {source}: {reason} (safetensors are needed)") from None
    except SafetensorError as error:
        raise UserError(f"the weights in {source} are damaged ({error}): fetch or write them again") from None
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"{source} cannot be loaded ({said}): mend config.json or generation_config.json") from error
    faults = {name: sorted(map(str, info[name])) for name in ("missing_keys", "mismatched_keys", "unexpected_keys")}
    faults["unexpected_keys"] = [key for key in faults["unexpected_keys"] if not key.endswith(_IGNORED)]
    if any(faults.values()):
        found = "; ".join(f"{name.replace('_', ' ')}: {', '.join(keys)}" for name, keys in faults.items() if keys)
        raise UserError(f"the weights in {source} do not fit its config: {found}")
    if config.tie_word_embeddings and not has_tied_head(model):
        raise UserError(
            f"{source} says that its head is tied and holds another weight for it: set tie_word_embeddings to false"
        )
    return model.eval()


def skeleton(source: Path) -> nn.Module:
    """The model that the config in `source` describes, without storage for its weights."""
    made, config = config_of(source)
    try:
        with torch.device("meta"):
            model: Any = made(config)
    except Exception as error:  # of any type, by the value that has no meaning
        raise UserError(f"no model can be built of the config in {source} ({error!r}): fetch it again") from error
    model.tie_weights()
    return model


def _class_of(config: Any, folder: Path) -> type:
    import transformers

    known = [name for name, arch in ARCHITECTURES.items() if arch.hugging_face]
    named = config.architectures or ["(none named)"]
    if named[0] not in known:
        raise UserError(f"{folder} holds a {named[0]}; known: {', '.join(sorted(known))}")
    return getattr(transformers, named[0])
