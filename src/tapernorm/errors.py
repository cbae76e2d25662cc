"""Errors that a user can act on, in the words of whoever asked."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_options: ContextVar[Mapping[str, str] | None] = ContextVar("_options", default=None)


class UserError(ValueError):
    """Bad input or a refused action. The command line prints its message, without a traceback, and exits 2."""


def setting(key: str) -> str:
    """The name of a setting in messages: its key in a config, or the option of the running verb that stands for it."""
    return (_options.get() or {}).get(key, key)


@contextmanager
def settings_named(options: Mapping[str, str]) -> Iterator[None]:
    """Let `setting` give the option in place of each config key in `options` while inside."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)
