"""What every refusal is: a UserError of one line that names what it is about."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tapernorm.util.errors import UserError


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """Inside, a UserError is raised whose message is one line and holds all of `words`."""
    with pytest.raises(UserError) as raised:
        yield
    said = str(raised.value)
    assert "\n" not in said
    assert all(word in said for word in words), said
