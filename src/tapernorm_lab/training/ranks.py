"""The processes (ranks) that train one model together, one per device. No other module uses torch.distributed.

A single process is rank 0 of 1, and these functions then return their input. All ranks must call the functions that
communicate in the same order. Whether one is called may therefore depend on the step and on shared values, but not on
a rank's own data.
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

_PATIENCE = timedelta(minutes=30)  # timeout for a silent rank, for example rank 0 while it writes a checkpoint
_SHUTDOWN_S = 120  # after SIGTERM, before SIGKILL: time for a last checkpoint
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def joined(devices: int, device: torch.device) -> Iterator[None]:
    """Join the `devices` ranks that torchrun has started, inside a `with` block; each takes one CUDA device.

    Raises:
        UserError: another number of ranks was started.
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
        if done or backend == "gloo":  # after an error, NCCL's shutdown would deadlock with waiting ranks
            dist.destroy_process_group()


def leads() -> bool:
    """Whether this process is rank 0, the only one that writes."""
    return rank() == 0


def require_ranks(devices: int, started: int | None = None) -> None:
    """Check that `devices` processes train.

    Args:
        devices: hardware.devices_per_job.
        started: number of processes that were started; None: the number of ranks that have joined.

    Raises:
        UserError: the numbers differ.
    """
    started = count() if started is None else started
    if devices != started:
        raise UserError(
            f"hardware.devices_per_job is {devices}, but {started} process{'es' * (started > 1)} train: use a "
            f"`tapernorm` command, which starts them, or start them with torchrun --nproc-per-node {devices}"
        )


def share_of(rows: Tensor) -> Tensor:
    """Return this rank's rows of a batch (B, ...): shares are equal and contiguous.

    Raises:
        UserError: B is not a multiple of the number of ranks. A mean over ranks would then differ from that over rows.
    """
    if len(rows) % count():
        raise UserError(
            f"a batch of {len(rows)} rows does not split evenly over {count()} devices: set hardware.devices_per_job "
            "to a divisor of the batch"
        )
    return rows.chunk(count())[rank()]


def dealt(items: Iterable[T]) -> Iterator[T]:
    """Yield this rank's items of `items`, which are dealt out to the ranks in turn.

    Raises:
        Stopped: a rank was asked to stop; raised on all ranks after each has processed its item.
    """
    for number, item in enumerate(items):
        if number % count() == rank():
            yield item
        if number % count() == count() - 1:
            stop_if_asked()


def asked_to_stop() -> Signals | None:
    """Return the signal that asked any rank to stop, or None; all ranks get a signal, or none does."""
    asked = requested()
    return (asked or Signals.SIGTERM) if gathered([float(asked is not None)]).any() else None


def stop_if_asked() -> None:
    """Raise Stopped on every rank if one of them was asked to stop."""
    if (asked := asked_to_stop()) is not None:
        raise Stopped(asked)


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients over the ranks, in place.

    A missing gradient counts as zero on a rank that lacks it. If no rank has it, it stays missing, and the optimizer
    skips the parameter as in a single process. This happens to one of a tapered norm's two gains at g = 0 and g = 1.
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
    """Gather the values (n,) of every rank; returns (ranks, n) float64 on the CPU."""
    every = torch.zeros(count(), len(values), dtype=torch.float64)
    every[rank()] = torch.tensor(values, dtype=torch.float64)
    if count() > 1:
        every = every.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        sum_in_place(every)  # each rank adds zeros to the rows of the others
    return every.cpu()


def from_leader(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 only; return its result, or raise its UserError, on every rank."""
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

    Torchrun's launcher watches them. It ends all processes if one fails, and forwards its signals to them. In a process
    that this launcher started, return False and start none.

    Args:
        devices: number of processes.
        words: command-line arguments.
        program: module that `python -m` runs.

    Raises:
        UserError: a process failed, and the others were ended.
        Stopped: this process was asked to stop, and the others have stopped.
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
    """Return the error of a job whose ranks ended with these exit codes; a negative code is a signal's number."""
    stopped = {code for number in SIGNALS for code in (-number, 128 + number)}  # asked to, or ended by the launcher
    ended = {rank: code for rank, code in codes.items() if code not in stopped}
    if not ended:
        return Stopped(signal.SIGTERM)
    told = [f"rank {r} {signal.Signals(-c).name if c < 0 else f'exit code {c}'}" for r, c in ended.items()]
    return UserError(
        f"the training has ended with {', '.join(told)}; their messages are above. Run the same command again to "
        "resume from the last checkpoint"
    )
