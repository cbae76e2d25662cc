"""A finished model on disk: model.safetensors and config.json in one folder."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from ..arch import architecture_of
from ..config import DecoderConfig
from ..configfile import parse
from ..errors import UserError
from ..files import read_json, whole_file, write_json
from ..norms import FixedScale, LayerNorm, TaperNorm
from ..taper import attach, taper_of
from .llama import Decoder

FORMAT = 2
TAPERED, FIXED, ABSENT = "tapered", "fixed_scale", "absent"  # what may stand in a norm's place


def save(model: Decoder, folder: Path) -> None:
    """Write weights and shape of a decoder: plain, tapered or folded. A tied head is stored once.

    config.json names every norm that is not the plain one, and what stands in its place. The gate is not stored:
    a saved taper is loaded at g = 0.
    """
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    if model.config.tie_head:
        del state["lm_head.weight"]
    with whole_file(folder / "model.safetensors") as temporary:
        temporary.write_bytes(to_bytes(state, metadata={"format": "pt"}))
    config = {"format": FORMAT, "architecture": "Decoder", "decoder": model.config.model_dump(mode="json")}
    write_json(folder / "config.json", config | {"norms": _changed_norms(model)})


def load(folder: str | Path) -> Decoder:
    """The model saved in `folder`, in eval mode; a tapered one at g = 0.

    Raises:
        UserError: a file is missing or damaged, or was written in another format.
    """
    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} holds no {name}: give the folder of a finished run")
    config = _read_config(folder / "config.json")
    if config.get("format") != FORMAT:
        raise UserError(f"{folder}/config.json has format {config.get('format')!r}; this version reads {FORMAT}")
    state = _read_weights(folder / "model.safetensors")
    model = Decoder(parse(DecoderConfig, config["decoder"], f"{folder}/config.json"))
    _change_norms(model, config["norms"], f"{folder}/config.json")
    _load_weights(model, state, folder / "model.safetensors")
    if TAPERED in config["norms"].values():
        taper_of(model).set_gate(0.0)
    return model.eval()


def _changed_norms(model: Decoder) -> dict[str, str]:
    """Norm -> what stands in its place, for every norm that is not plain."""
    kinds = {TaperNorm: TAPERED, FixedScale: FIXED, nn.Identity: ABSENT}
    arch = architecture_of(model)
    norms = {name: model.get_submodule(name) for name in [*arch.internal_norms(model), arch.final]}
    return {name: word for name, norm in norms.items() for kind, word in kinds.items() if isinstance(norm, kind)}


def _change_norms(model: Decoder, norms: dict[str, str], source: str) -> None:
    """Bring the norms of a fresh model into the saved form."""
    arch = architecture_of(model)
    known = {*arch.internal_norms(model), arch.final}
    for name, word in norms.items():
        if name not in known or word not in (TAPERED, FIXED, ABSENT):
            raise UserError(f"{source} has {name!r} as {word!r}: it is damaged, run the job that wrote it again")
    tapered = [name for name, word in norms.items() if word == TAPERED]
    if tapered:
        attach(model, final=arch.final in tapered, sites=[name for name in tapered if name != arch.final])
    for name, word in norms.items():
        norm = model.get_submodule(name)
        if word == FIXED:
            centre = isinstance(norm, LayerNorm)
            model.set_submodule(name, FixedScale(model.config.d_model, centre=centre, bias=centre))
        elif word == ABSENT:
            model.set_submodule(name, nn.Identity())
            if isinstance(norm, LayerNorm):  # its bias went into the linear maps behind it
                for consumer in arch.consumers(name):
                    layer = model.get_submodule(consumer)
                    assert isinstance(layer, nn.Linear)
                    layer.bias = nn.Parameter(torch.zeros(layer.out_features))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): run the job that wrote it again") from None


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}): run the job that wrote it again") from None


def _load_weights(model: Decoder, state: dict[str, Tensor], path: Path) -> None:
    expected = model.state_dict()
    if model.config.tie_head:
        del expected["lm_head.weight"]
    missing, unexpected = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    misshapen = [k for k in sorted(expected.keys() & state.keys()) if state[k].shape != expected[k].shape]
    if missing or unexpected or misshapen:
        raise UserError(
            f"{path} does not fit config.json: missing {missing}, unexpected {unexpected}, of another shape {misshapen}"
        )
    model.load_state_dict(state, strict=False)
