"""A decoder on more tokens than it was trained on: its rotary positions go on as they began."""

from .llama import Attention, Decoder, RotaryTable


def lengthen(model: Decoder, context: int) -> None:
    """Let `model` take up to `context` tokens; at the positions that it had, nothing of it changes.

    Raises:
        ValueError: it takes more already.
    """
    if context < model.config.context:
        raise ValueError(f"the model takes {model.config.context} tokens, and {context} are fewer")
    device = next(model.parameters()).device
    model.config = model.config.model_copy(update={"context": context})
    rotary = RotaryTable(model.config).to(device)
    for module in model.modules():
        if isinstance(module, Attention):
            module.rotary = rotary
