"""What others put in a norm's place, and how it comes back from disk.

A replacement's class carries its word in config.json as `stored_as`. The distribution that defines the class registers
the word in the entry-point group `tapernorm.norms`. What the word names is a `Restore`.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points

from torch import Tensor, nn

from ..util.errors import UserError

GROUP = "tapernorm.norms"
# Brings the modules of these names in a fresh model into the form that they had; the state is that of the saved model.
Restore = Callable[[nn.Module, Sequence[str], Mapping[str, Tensor]], None]


def word_of(module: nn.Module) -> str | None:
    """The word in config.json for a module that replaces a plain one; None: it is registered as no replacement."""
    return getattr(type(module), "stored_as", None)


def restorer(word: str, source: str) -> Restore:
    """How replacements of this word come back.

    Args:
        source: the file that holds the word, for the message.

    Raises:
        UserError: nothing that is installed registers the word, or what does cannot be imported.
    """
    registered = entry_points(group=GROUP, name=word)
    if not registered:
        raise UserError(
            f"{source} has {word!r} in place of a norm, and no installed package restores it: it is damaged, or "
            "written by a package that is missing here"
        )
    entry = next(iter(registered))
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        lacking = f"the extra {', '.join(entry.extras)!r}" if entry.extras else f"the package {error.name}"
        raise UserError(f"{source} has {word!r} in place of a norm, which needs {lacking}: install it") from None
