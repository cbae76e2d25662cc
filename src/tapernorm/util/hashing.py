"""The identity of a setting: one JSON text for equal values, and its short digest."""

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces. Equal values give equal text."""
    if hasattr(value, "model_dump"):  # of pydantic
        value = value.model_dump(mode="json")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """First 16 hex digits of the sha256 of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]
