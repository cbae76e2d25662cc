"""The guard of `save_pretrained` for a transformers model whose norms are tapered, fixed or gone.

The original method would save the weights with the config of a stock model. Loading them would give another function,
at best with a warning. If every norm is tapered, `export` can write an equivalent stock model.
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
# Every class of transformers refuses a config.json with these fields, and its message shows the reason. Without them or
# the file, a class takes its default config, which fits the weights of a GPT-2 small.
UNREADABLE = {
    "model_type": "tapernorm",
    "vocab_size": "no stock model: its norms are tapered, fixed or gone. tapernorm.load reads what tapernorm saved or "
    "exported; a checkpoint's weights go into a model whose norms were changed alike",
}


def guard_saving(model: nn.Module) -> None:
    """Let `save_pretrained` of this model instance write a checkpoint. Deep copies and pickles keep the guard.

    transformers has no hook before saving. A subclass would change the name of the model's class, and a patch of the
    class would affect all other models.
    """
    if hasattr(model, _METHOD):
        model.__dict__[_METHOD] = partial(save_checkpoint, model)


def unguard_saving(model: nn.Module) -> None:
    """Restore the class's own `save_pretrained` for `model`."""
    model.__dict__.pop(_METHOD, None)


def save_checkpoint(
    model: nn.Module,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """Write the weights of a training checkpoint, with a config.json that every `from_pretrained` refuses.

    model.safetensors loads into a model whose norms were changed in the same way. A tied head is stored once, which
    needs strict=False. The taper's own state is `Taper.state_dict`.

    Raises:
        UserError: a checkpoint does not support an option of `save_pretrained`, or the folder holds another model.
    """
    if options:
        raise UserError(
            f"save_pretrained of a model with changed norms writes a training checkpoint, which takes no "
            f"{', '.join(sorted(options))}: for a model that loads anywhere, export it at g = 0, or detach() the taper "
            "at g = 1 and save that model"
        )
    if not is_main_process:
        return
    folder = Path(save_directory)
    config = folder / "config.json"
    if config.exists() and read_json(config) != UNREADABLE:
        raise UserError(f"{folder} holds another model, whose weights would be overwritten: give an empty folder")
    state = dict(model.state_dict() if state_dict is None else state_dict)
    if has_tied_head(model):
        state.pop(f"{architecture_of(model).head}.weight", None)
    write_json(config, UNREADABLE)
    with whole_file(folder / "model.safetensors") as temporary:
        temporary.write_bytes(save({k: v.contiguous() for k, v in state.items()}, metadata={"format": "pt"}))
