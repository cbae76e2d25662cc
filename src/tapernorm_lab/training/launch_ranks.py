"""Starts the processes that train one model together, with torchrun's own launcher, and tells what became of them.

The launcher watches them: where one ends badly it ends the others, and the signals that it gets it hands on.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from torch.distributed import is_torchelastic_launched
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tapernorm.util.errors import UserError

from .stop_signals import SIGNALS, Stopped

_SHUTDOWN_S = 120  # after SIGTERM, before SIGKILL: time for a last checkpoint


def start_ranks(devices: int, words: Sequence[str]) -> bool:
    """Run `tapernorm WORDS` in `devices` processes and wait for them.

    Returns False, having started none, where this is one of them.

    Raises:
        UserError: one of them ended badly, and so the others were ended.
        Stopped: this process was asked to stop, and they have stopped.
    """
    if is_torchelastic_launched():
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
        elastic_launch(config, sys.executable)("-m", "tapernorm_lab.cli.main", *words)
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
