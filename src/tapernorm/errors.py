"""Errors that a user can act on."""


class UserError(ValueError):
    """Bad input or a refused action. The command line prints its message, without a traceback, and exits 2."""
