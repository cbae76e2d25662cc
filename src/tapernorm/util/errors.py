"""Errors that a user can act on, in the words of the command or config that the user wrote."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_options: ContextVar[Mapping[str, str] | None] = ContextVar("_options", default=None)


class UserError(ValueError):
    """The error for a wrong input or a refused action. Its message states the rule and the remedy.

    The command line prints the message without a traceback and exits with status 2.
    """


def one_line(error: Exception, *, named: bool = False) -> str:
    """Return the message of another library's error in one line of at most 200 characters.

    If `named`, the type of the error comes first.
    """
    said = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {said}" if named else said


def setting(key: str) -> str:
    """Return the name of a setting in messages: its key in a config, or the option of the running verb."""
    return (_options.get() or {}).get(key, key)


@contextmanager
def settings_named(options: Mapping[str, str]) -> Iterator[None]:
    """Let `setting` return these options (key -> name in messages) inside."""
    token = _options.set({**(_options.get() or {}), **options})
    try:
        yield
    finally:
        _options.reset(token)
