"""The processes that train one model together, a device each: the only place that knows of torch.distributed.

A process by itself is rank 0 of 1, and nothing here then does anything but hand back what it was given. Every rank
calls the functions that exchange something in the same order, so whether one is called may hang on the step and on
what all ranks share, never on a rank's own data.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from signal import Signals
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tapernorm.util.distributed import count, in_contact, rank, sum_in_place, sum_over_ranks
from tapernorm.util.errors import UserError

from .stop_signals import SIGNALS, Stopped, requested

T = TypeVar("T")

_PATIENCE = timedelta(minutes=30)  # with a rank that lives and says nothing, rank 0 writing a checkpoint for instance
_SHUTDOWN_S = 120  # after SIGTERM, before SIGKILL: time for a last checkpoint
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def joined(devices: int, device: torch.device) -> Iterator[None]:
    """Be one of the `devices` ranks that torchrun has started, while inside; each takes a CUDA device of its own.

    Raises:
        UserError: another number was started.
    """
    require_ranks(devices, int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1)
    if devices == 1:
        yield
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # when the launcher dies
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_PATIENCE)
    done = False
    try:
        yield
        done = True
    finally:
        if done or backend == "gloo":  # NCCL's farewell would wait for ranks that are waiting for this one
            dist.destroy_process_group()


def leads() -> bool:
    """Whether this is rank 0, the one that writes."""
    return rank() == 0


def require_ranks(devices: int, started: int | None = None) -> None:
    """Raise UserError where other than `devices` processes train; started: so many, or as many as have met."""
    started = count() if started is None else started
    if devices != started:
        raise UserError(
            f"hardware.devices_per_job is {devices} and {started} process{'es' * (started > 1)} train: the verbs of "
            f"`tapernorm` start as many as it says, or start them yourself: torchrun --nproc-per-node {devices}"
        )


def share_of(rows: Tensor) -> Tensor:
    """This rank's rows of a batch (B, ...): shares are equal and contiguous.

    Raises:
        UserError: B is no multiple of the number of ranks, so that a mean over ranks would not be one over rows.
    """
    if len(rows) % count():
        raise UserError(
            f"a batch of {len(rows)} rows does not split evenly over {count()} devices: set hardware.devices_per_job "
            "to a divisor of the batch"
        )
    return rows.chunk(count())[rank()]


def dealt(items: Iterable[T]) -> Iterator[T]:
    """This rank's items of `items`: every so many-th. All ranks iterate over as many.

    Raises:
        Stopped: a rank was asked to stop, after each rank has dealt with an item.
    """
    for number, item in enumerate(items):
        if number % count() == rank():
            yield item
        if number % count() == count() - 1:
            stop_if_asked()


def asked_to_stop() -> Signals | None:
    """The signal that asked this process or another rank to stop; on all ranks, or on none of them."""
    asked = requested()
    return (asked or Signals.SIGTERM) if gathered([float(asked is not None)]).any() else None


def stop_if_asked() -> None:
    """Raise Stopped on every rank where one of them was asked to stop."""
    if (asked := asked_to_stop()) is not None:
        raise Stopped(asked)


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients over the ranks, in place.

    One that is missing counts as zero on a rank that lacks it, and stays missing where no rank has it: the optimizer
    then leaves its parameter alone, as it does in a single process. (A tapered norm's two gains take turns at it.)
    """
    if count() == 1:
        return
    held = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    sum_in_place(held)
    gradients = []
    for parameter, holders in zip(parameters, held.tolist(), strict=True):
        if holders:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    sum_over_ranks(gradients)


def gathered(values: Sequence[float]) -> Tensor:
    """The values (n,) of every rank, (ranks, n) float64 on the CPU."""
    every = torch.zeros(count(), len(values), dtype=torch.float64)
    every[rank()] = torch.tensor(values, dtype=torch.float64)
    if count() > 1:
        every = every.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        sum_in_place(every)  # to the other ranks' rows, each adds nothing
    return every.cpu()


def from_leader(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, which alone calls it, on every rank; likewise a UserError that it raises."""
    if count() == 1:
        return make()
    outcome: list[Any] = [None, None]
    if leads():
        try:
            outcome[0] = make()
        except UserError as error:
            outcome[1] = error
    with in_contact():
        dist.broadcast_object_list(outcome, src=0)
    value, error = outcome
    if error is not None:
        raise error
    return value


def start_ranks(devices: int, words: Sequence[str], *, program: str) -> bool:
    """Run `program WORDS` in `devices` processes and wait for them.

    Torchrun's own launcher watches them: where one ends badly it ends the others, and the signals that it gets it hands
    on. Returns False, having started none, where this is one of them.

    Args:
        program: the module of the command line, that `python -m` runs.

    Raises:
        UserError: one of them ended badly, and so the others were ended.
        Stopped: this process was asked to stop, and they have stopped.
    """
    if dist.is_torchelastic_launched():
        return False
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        shutdown_timeout=_SHUTDOWN_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", program, *words)
    except SignalException as error:
        raise Stopped(signal.Signals(error.sigval)) from None
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
        raise _failure(codes) from None
    return True


def _failure(codes: Mapping[int, int]) -> UserError | Stopped:
    """What a job has come to whose ranks ended with these exit codes, a negative one being a signal's number."""
    stopped = {code for number in SIGNALS for code in (-number, 128 + number)}  # asked to, or ended by the launcher
    ended = {rank: code for rank, code in codes.items() if code not in stopped}
    if not ended:
        return Stopped(signal.SIGTERM)
    told = [f"rank {r} {signal.Signals(-c).name if c < 0 else f'exit code {c}'}" for r, c in ended.items()]
    return UserError(
        f"the training has ended with {', '.join(told)}; see above what they said. The same command goes on from the "
        "last checkpoint"
    )
