"""The only place that creates random generators."""

import hashlib

import torch


def generator(seed: int, stream: str) -> torch.Generator:
    """A CPU generator that is a pure function of (seed, stream name); different streams are independent."""
    digest = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
