"""A test in which nobody may reach for the network."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def offline() -> Iterator[None]:
    """Connections and look-ups of names fail inside, as they do without a network.

    Raises:
        AssertionError: at the end, if there were any: a library may have taken the failure in silence.
    """
    attempts = []

    def refuse(*address: object, **_: object) -> None:
        attempts.append(address[-1] if isinstance(address[0], socket.socket) else address[:2])
        raise OSError("no network in this test")

    with pytest.MonkeyPatch.context() as patched:
        for name in ("connect", "connect_ex"):
            patched.setattr(socket.socket, name, refuse)
        patched.setattr(socket, "getaddrinfo", refuse)
        yield
    assert not attempts, f"reached for the network: {attempts}"
