"""The storage of finished models: a folder with model.safetensors and config.json.

generation_config.json is saved too, if a model of transformers has one that its config does not imply.
"""

from dataclasses import asdict
from inspect import get_annotations
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from tapernorm.models.decoder_config import DecoderConfig

from ..architectures import ARCHITECTURES, Architecture, architecture_of, has_tied_head
from ..linear_maps import give_bias
from ..models.decoder import Decoder
from ..norms import FixedScale, LayerNorm, TaperNorm
from ..taper import attach, taper_of
from ..util.atomic_files import read_json, whole_file, write_json, write_text
from ..util.errors import UserError, one_line
from ..util.progress import announced
from .replacements import restorer, word_of
from .save_guard import UNREADABLE, guard_saving

M = TypeVar("M", bound=nn.Module)
FORMAT = 3
MODEL_FILES = ("config.json", "model.safetensors")
GENERATION = "generation_config.json"
TAPERED, FIXED, ABSENT = "tapered", "fixed_scale", "absent"  # words for a norm's place; `replacements` registers others
_OF_THE_FILE = {"_name_or_path", "architectures", "dtype", "model_type", "torch_dtype", "transformers_version"}


def save(model: nn.Module, folder: Path) -> None:
    """Save weights and config of a model: plain, tapered, folded, or with replaced norms.

    config.json lists every norm that is not plain, and its replacement. A tied head is stored once. The gate is not
    stored: a tapered model is loaded at g = 0.

    Raises:
        UserError: the architecture is unknown, or the config contradicts whether the head is tied.
    """
    arch = architecture_of(model)
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    if has_tied_head(model) != (tied := getattr(model.config, arch.tied)):
        raise UserError(
            f"{arch.tied} is {tied} in the model's config, and its {arch.head} is {'not ' if tied else ''}tied: "
            f"set {arch.tied} to {not tied}"
        )
    if tied:
        del state[f"{arch.head}.weight"]
    with whole_file(folder / "model.safetensors") as temporary:
        temporary.write_bytes(to_bytes(state, metadata={"format": "pt"}))
    _save_generation(model, folder)
    config = {"format": FORMAT, "architecture": type(model).__name__, "config": _config_of(model, arch)}
    config |= {"norms": _changed_norms(model, arch)} | (UNREADABLE if arch.hugging_face else {})
    if more := _more_of(model, arch, config["config"]):
        config["more"] = more
    if (word := word_of(model.get_submodule(_embedding_of(model)))) is not None:
        config["embedding"] = word
    write_json(folder / "config.json", config)


@announced("loading a model")
def load(folder: str | Path, kind: type[M] = nn.Module) -> M:
    """Load the model saved in `folder`, in float32 and eval mode. A tapered model has g = 0.

    Args:
        folder: the folder that `save` wrote.
        kind: the class that the model must have.

    Raises:
        UserError: a file is missing, damaged or of another format, or the model has another class.
    """
    folder = Path(folder)
    for name in MODEL_FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder} holds no {name}: give the folder of a finished run")
    source = f"{folder}/config.json"
    config = read_json(folder / "config.json")
    if config.get("format") != FORMAT:
        raise UserError(f"{source} has format {config.get('format')!r}, and this version reads format {FORMAT}")
    needed = {"architecture": str, "config": dict, "norms": dict}
    if missing := sorted(key for key, kind in needed.items() if not isinstance(config.get(key), kind)):
        raise UserError(f"{source} lacks {', '.join(missing)}: it is damaged; run the job that wrote it again")
    try:
        state = load_file(folder / "model.safetensors")
    except SafetensorError as error:
        raise _damaged(folder / "model.safetensors", error) from None
    model = _build(config["architecture"], config["config"], config.get("more", {}), source)
    if not isinstance(model, kind):
        raise UserError(f"{folder} holds a {type(model).__name__}, and a {kind.__name__} is needed here")
    _change_norms(model, config["norms"], state, source)
    if (word := config.get("embedding")) is not None:
        restorer(word, source)(model, [_embedding_of(model)], state)
    _load_weights(model, state, folder / "model.safetensors")
    _load_generation(model, folder / GENERATION)
    if config["norms"]:
        guard_saving(model)
    if any(map(_is_tapered, config["norms"].values())):
        taper_of(model).set_gate(0.0)
    return model.eval()


def is_ours(folder: Path) -> bool:
    """Return whether `save` wrote the config.json in `folder`, in any format. A damaged file gives False."""
    try:
        return "format" in read_json(folder / "config.json")
    except (OSError, UserError):
        return False


def _config_of(model: nn.Module, arch: Architecture) -> dict[str, Any]:
    config: Any = model.config
    if arch.hugging_face:
        # Only the fields of its own class: inherited fields are about tasks and files.
        return {field: getattr(config, field) for field in get_annotations(type(config))}
    return asdict(config)


def _more_of(model: nn.Module, arch: Architecture, own: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a transformers config that `own`, its defaults and its file's metadata do not imply."""
    if not arch.hugging_face:
        return {}
    config: Any = model.config
    usual = type(config)(**own).to_dict()
    said = config.to_dict()
    return {k: v for k, v in said.items() if k not in (own.keys() | _OF_THE_FILE) and v != usual.get(k)}


def _save_generation(model: nn.Module, folder: Path) -> None:
    known: Any = getattr(model, "generation_config", None)
    if known is None or known == type(known).from_model_config(model.config):
        (folder / GENERATION).unlink(missing_ok=True)  # an earlier model may have left one
    else:
        write_text(folder / GENERATION, known.to_json_string(use_diff=True, keys_to_pop=["compile_config"]))


def _load_generation(model: nn.Module, path: Path) -> None:
    library: Any = model
    if not path.is_file():
        return
    try:
        library.generation_config = type(library.generation_config).from_pretrained(path.parent)
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, error) from None


def _build(name: str, config: dict[str, Any], more: dict[str, Any], source: str) -> nn.Module:
    """Build a model of that class and config, without loading its weights."""
    if name not in ARCHITECTURES:
        raise UserError(f"{source} has the architecture {name!r}; known: {', '.join(sorted(ARCHITECTURES))}")
    if not ARCHITECTURES[name].hugging_face:
        return Decoder(DecoderConfig.read(config, source))
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    made: Any = getattr(transformers, name)
    if different := sorted(get_annotations(made.config_class).keys() ^ config.keys()):
        named = ", ".join(different)
        raise UserError(f"{source} does not fit {made.config_class.__name__}: unknown or missing {named}")
    try:
        return blank(made, made.config_class(**config, **more))
    except StrictDataclassError as error:
        raise _damaged(source, error) from None


def _damaged(place: str | Path, error: Exception) -> UserError:
    return UserError(f"{place} is damaged ({one_line(error)}): run the job that wrote it again")


def blank(kind: type[M], config: Any) -> M:
    """Build a transformers model with tied but uninitialised weights. It draws no random number."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model: Any = kind(config)
    model.tie_weights()
    return model


def _changed_norms(model: nn.Module, arch: Architecture) -> dict[str, str]:
    """Return the word of every norm that is not plain, by full name."""
    own = {TaperNorm: TAPERED, FixedScale: FIXED, nn.Identity: ABSENT}
    norms = {name: model.get_submodule(name) for name in arch.norms(model)}
    words = {
        name: word_of(norm) or next((word for kind, word in own.items() if isinstance(norm, kind)), None)
        for name, norm in norms.items()
    }
    return {name: word for name, word in words.items() if word is not None}


def _is_tapered(word: str) -> bool:
    """Return whether the word is that of a tapered norm: "tapered", or "tapered_..." for registered variants."""
    return word.partition("_")[0] == TAPERED


def _embedding_of(model: nn.Module) -> str:
    """Return the full name of the token embedding."""
    return next(name for name, module in model.named_modules() if isinstance(module, nn.Embedding))


def _change_norms(model: nn.Module, norms: dict[str, str], state: dict[str, Tensor], source: str) -> None:
    """Replace the norms of a fresh model as `norms` (full name -> word) says."""
    arch = architecture_of(model)
    known = arch.norms(model)
    for name, word in norms.items():
        if name not in known or not isinstance(word, str):
            raise UserError(f"{source} has {name!r} as {word!r}: it is damaged; run the job that wrote it again")
    own = (TAPERED, FIXED, ABSENT)
    restorers = {word: restorer(word, source) for word in sorted(set(norms.values())) if word not in own}
    tapered = [name for name, word in norms.items() if _is_tapered(word)]
    if tapered:
        attach(model, final=arch.final in tapered, sites=[name for name in tapered if name != arch.final])
    for word, restore in restorers.items():
        restore(model, [name for name, its_word in norms.items() if its_word == word], state)
    for name, word in norms.items():
        norm = model.get_submodule(name)
        bias = getattr(norm, "bias", None) is not None
        if word == FIXED:
            width = len(norm.get_parameter("weight"))
            model.set_submodule(name, FixedScale(width, centre=isinstance(norm, LayerNorm), bias=bias))
        elif word == ABSENT:
            model.set_submodule(name, nn.Identity())
            for consumer in arch.consumers(name) if bias else ():  # folding moved the norm's bias into these maps
                give_bias(model.get_submodule(consumer))


def _load_weights(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    expected = model.state_dict()
    if has_tied_head(model):
        del expected[f"{architecture_of(model).head}.weight"]
    missing, unexpected = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    misshapen = [k for k in sorted(expected.keys() & state.keys()) if state[k].shape != expected[k].shape]
    if missing or unexpected or misshapen:
        raise UserError(
            f"{path} does not fit config.json: missing {missing}, unexpected {unexpected}, of another shape {misshapen}"
        )
    model.load_state_dict(state, strict=False)
