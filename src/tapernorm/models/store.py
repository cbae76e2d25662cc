"""A finished model on disk: model.safetensors and config.json in one folder."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

from ..config import DecoderConfig, parse
from ..errors import UserError
from ..files import read_json, whole_file, write_json
from ..norms import TaperNorm
from ..taper import attach, taper_of
from .llama import Decoder

FORMAT = 1


def save(model: Decoder, folder: Path) -> None:
    """Write weights and shape of a decoder, tapered or not; a tied head is stored once.

    The tapered norms are named in config.json; the gate is not stored: a saved taper is loaded at g = 0.
    """
    tapered = [name for name, module in model.named_modules() if isinstance(module, TaperNorm)]
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    if model.config.tie_head:
        del state["lm_head.weight"]
    with whole_file(folder / "model.safetensors") as temporary:
        temporary.write_bytes(to_bytes(state, metadata={"format": "pt"}))
    config = {"format": FORMAT, "architecture": "Decoder", "decoder": model.config.model_dump(mode="json")}
    write_json(folder / "config.json", config | {"tapered": tapered})


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
    model = Decoder(parse(DecoderConfig, config["decoder"], f"{folder}/config.json"))
    if config["tapered"]:
        final = "model.norm" in config["tapered"]
        attach(model, final=final, sites=[n for n in config["tapered"] if n != "model.norm"])
    _load_weights(model, folder / "model.safetensors")
    if config["tapered"]:
        taper_of(model).set_gate(0.0)
    return model.eval()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): run the job that wrote it again") from None


def _load_weights(model: Decoder, path: Path) -> None:
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}): run the job that wrote it again") from None
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
