"""The only place that creates or seeds random generators."""

import hashlib

import torch


def generator(seed: int, stream: str) -> torch.Generator:
    """Return a CPU generator that is a pure function of seed and stream name. Different streams are independent."""
    digest = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def seed_dropout(seed: int, step: int, rank: int = 0) -> None:
    """Seed the generators of dropout, on every device, as a pure function of (seed, step, rank).

    A resumed run therefore draws the same dropout as an uninterrupted one. Different ranks draw differently.
    """
    stream = f"dropout/{step}" if rank == 0 else f"dropout/{step}/rank{rank}"
    number = generator(seed, stream).initial_seed()
    torch.default_generator.manual_seed(number)
    # torch.manual_seed stores a formatted stack per call for each unused kind of device: memory would grow with every
    # step.
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
