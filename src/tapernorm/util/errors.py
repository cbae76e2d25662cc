"""Errors that a user can act on, in the words of whoever asked."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_options: ContextVar[Mapping[str, str] | None] = ContextVar("_options", default=None)


class UserError(ValueError):
    """Bad input or a refused action. The command line prints its message, without a traceback, and exits 2."""


def one_line(error: Exception, *, named: bool = False) -> str:
    """What an error of another library says, in one line of at most 200 characters; `named`: its type first."""
    said = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {said}" if named else said


def setting(key: str) -> str:
    """What messages call a setting: its key in a config, or what the running verb has in its place, as an option."""
    return (_options.get() or {}).get(key, key)


@contextmanager
def settings_named(options: Mapping[str, str]) -> Iterator[None]:
    """Let `setting` give these words in place of the keys while inside."""
    token = _options.set({**(_options.get() or {}), **options})
    try:
        yield
    finally:
        _options.reset(token)
