"""What `save_pretrained` of a model of transformers does while its norms are tapered, fixed or gone.

Its own would write weights beside a config that promises a stock model: loaded again, at best with a warning, that
would be another function. Where every norm was tapered, `export` writes a stock model that is the same one.
"""

from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from ..architectures import architecture_of, has_tied_head
from ..util.atomic_files import read_json, whole_file, write_json
from ..util.errors import UserError

_METHOD = "save_pretrained"
# A config.json with these fields is refused by every class of transformers, with the reason in the message. Without
# them, or without the file, a class takes its default config, and the weights of a GPT-2 small would fit.
UNREADABLE = {
    "model_type": "tapernorm",
    "vocab_size": "no stock model: its norms are tapered, fixed or gone. tapernorm.load reads what tapernorm saved or "
    "exported; a checkpoint's weights go into a model whose norms were changed alike",
}


def guard_saving(model: nn.Module) -> None:
    """Let `save_pretrained` of this one model write a checkpoint; a copy or a pickle has a method of its own.

    transformers offers no hook before it saves; another class would change the name by which the model is known, and a
    patch of its class would reach every other model.
    """
    if hasattr(model, _METHOD):
        model.__dict__[_METHOD] = partial(save_checkpoint, model)


def unguard_saving(model: nn.Module) -> None:
    """Give `model` back the method of its class."""
    model.__dict__.pop(_METHOD, None)


def save_checkpoint(
    model: nn.Module,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """Write the weights that training goes on from, with a config.json that every `from_pretrained` refuses.

    model.safetensors loads into a model whose norms were changed alike, with strict=False where a tied head is stored
    once. The taper's own state is `Taper.state_dict`.

    Raises:
        UserError: an option of `save_pretrained` that a checkpoint has no place for, or a folder with another model.
    """
    if options:
        raise UserError(
            f"a model with changed norms is saved as a checkpoint, which takes no {', '.join(sorted(options))}: for a "
            "model to load anywhere, export it at g = 0, or detach() the taper at g = 1, and save that"
        )
    if not is_main_process:
        return
    folder = Path(save_directory)
    config = folder / "config.json"
    if config.exists() and read_json(config) != UNREADABLE:
        raise UserError(f"{folder} holds another model, and this would take its weights' place: give an empty folder")
    state = dict(model.state_dict() if state_dict is None else state_dict)
    if has_tied_head(model):
        state.pop(f"{architecture_of(model).head}.weight", None)
    write_json(config, UNREADABLE)
    with whole_file(folder / "model.safetensors") as temporary:
        temporary.write_bytes(save({k: v.contiguous() for k, v in state.items()}, metadata={"format": "pt"}))
