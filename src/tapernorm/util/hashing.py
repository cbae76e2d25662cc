"""Canonical JSON and short digests, which identify settings."""

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """Return the canonical JSON of a value: sorted keys, no spaces. Equal values give equal text."""
    if hasattr(value, "model_dump"):  # a pydantic model
        value = value.model_dump(mode="json")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """Return the first 16 hex digits of the sha256 of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]
