"""The only place that creates or seeds random generators."""

import hashlib

import torch


def generator(seed: int, stream: str) -> torch.Generator:
    """A CPU generator that is a pure function of (seed, stream name); different streams are independent."""
    digest = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def seed_dropout(seed: int, step: int, rank: int = 0) -> None:
    """Seed the generators that dropout draws from, those of every device, as a pure function of (seed, step, rank).

    A resumed run thus drops what an undisturbed one does. The ranks that train one model draw apart.
    """
    stream = f"dropout/{step}" if rank == 0 else f"dropout/{step}/rank{rank}"
    number = generator(seed, stream).initial_seed()
    torch.default_generator.manual_seed(number)
    # torch.manual_seed would keep a formatted stack per call for each kind of device that is not in use, so that memory
    # grows with every step.
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
