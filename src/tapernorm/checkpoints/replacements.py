"""Replacements of norms by modules of other packages, and their restoration from disk.

The attribute `stored_as` of a replacement's class is its word in config.json. The package that defines the class
registers a `Restore` under this word, in the entry-point group `tapernorm.norms`.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points

from torch import Tensor, nn

from ..util.errors import UserError

GROUP = "tapernorm.norms"
# Replaces the named modules of a fresh model by those of the saved kind, whose state dict is the last argument.
Restore = Callable[[nn.Module, Sequence[str], Mapping[str, Tensor]], None]


def word_of(module: nn.Module) -> str | None:
    """Return the word in config.json of a module that replaces a plain one, or None if it is not a replacement."""
    return getattr(type(module), "stored_as", None)


def restorer(word: str, source: str) -> Restore:
    """Return the function that restores replacements of this word.

    Args:
        word: the word in config.json.
        source: the file that holds the word, for the message.

    Raises:
        UserError: no installed package registers the word, or the registered function cannot be imported.
    """
    registered = entry_points(group=GROUP, name=word)
    if not registered:
        raise UserError(
            f"{source} has {word!r} in place of a norm, and no installed package restores it: install the package that "
            "wrote it, or restore the file if it is damaged"
        )
    entry = next(iter(registered))
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        lacking = f"the extra {', '.join(entry.extras)!r}" if entry.extras else f"the package {error.name}"
        raise UserError(f"{source} has {word!r} in place of a norm, which needs {lacking}: install it") from None
