"""One training job per GPU slot on a machine with several GPUs, for all jobs of a user.

Every device has `jobs_per_gpu` slots. A slot is a file that its job keeps locked (`flock`), so that the kernel frees it
when the process ends, even after a kill. CUDA_VISIBLE_DEVICES then hides all other devices from the job; it must be set
before CUDA starts. If a scheduler or the user has set that variable, only its devices are used.
"""

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path

from tapernorm.util.errors import UserError

from .run_lock import waiting

VISIBLE = "CUDA_VISIBLE_DEVICES"
_RANK = "TORCHELASTIC_RUN_ID"  # set by torch's launcher in the processes that it starts
_POLL_S = 1.0  # no system call can wait for the first of several locks


@contextmanager
def device_slot(device: str, jobs_per_gpu: int = 1, *, whole: int = 0) -> Iterator[str | None]:
    """Hold a slot of one GPU inside a `with` block, make that GPU the only one that CUDA sees, and yield its name.

    While every slot is taken, print a message and wait. Yield None and do nothing for device `cpu` and if no GPU is
    found; `pick_device` refuses `cuda` then. Do nothing in one rank of several either: the process that started the
    ranks holds the devices of all.

    Args:
        device: hardware.device: auto, cpu or cuda.
        jobs_per_gpu: slots of each device.
        whole: number of devices whose slots are all held, in place of one slot; 0: one slot.

    Raises:
        UserError: there are fewer devices than `whole`, or the folder of the locks belongs to another user.
    """
    names = [] if device == "cpu" or _RANK in os.environ else visible_devices(os.environ)
    if not names:
        yield None
        return
    if whole > len(names):
        have = f"{len(names)} ({', '.join(names)})"
        raise UserError(
            f"hardware.devices_per_job is {whole}, but this process may use {have}: lower it to at most that"
        )
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "CUDA has started: it would not see the device chosen here"
    before = {VISIBLE: os.environ[VISIBLE]} if VISIBLE in os.environ else {}
    chosen, locks = _wait(names, jobs_per_gpu, whole)
    with locks:
        os.environ[VISIBLE] = ",".join(chosen)
        try:
            yield os.environ[VISIBLE]
        finally:
            del os.environ[VISIBLE]
            os.environ.update(before)


def most_threads() -> int:
    """Return the largest number of CPU threads that a job may ask for on this machine."""
    return max(64, 8 * (os.cpu_count() or 1))


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """List the GPUs that this process may use, in the order of CUDA_VISIBLE_DEVICES, by UUID if the driver gives it.

    An index refers to the list of `nvidia-smi`. Under a scheduler that hides the other GPUs every job has index 0, so
    that only the UUID tells them apart. A word that names no device, such as NoDevFiles, hides all devices from there
    on, as in CUDA.
    """
    listed = _listed_uuids()
    if VISIBLE not in environment:
        return listed
    words = (word.strip() for word in environment[VISIBLE].split(","))
    names = takewhile(lambda word: word.isdigit() or word.startswith(("GPU-", "MIG-")), words)
    return [listed[int(name)] if name.isdigit() and int(name) < len(listed) else name for name in names]


def _listed_uuids() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else []


def _lock_folder() -> Path:
    """Return the folder of the locks, one per user: others could hold the locks of a shared folder."""
    folder = Path("/tmp") / f"tapernorm-gpu-slots-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise UserError(f"{folder} holds the locks of the GPU slots, but belongs to another user: remove it")
    return folder


def _wait(names: Sequence[str], jobs_per_gpu: int, whole: int) -> tuple[list[str], ExitStack]:
    """Wait until enough devices are free; return their names and the stack that holds their locks."""
    folder = _lock_folder()
    files = {name: [folder / f"{name.replace('/', '-')}.slot{slot}" for slot in range(jobs_per_gpu)] for name in names}
    # One slot: a device gets a second job only when every device has its first.
    slots = [(name, [files[name][slot]]) for slot in range(jobs_per_gpu) for name in names]
    choices, wanted = (list(files.items()), whole) if whole else (slots, 1)
    told = False
    while True:
        chosen: list[str] = []
        holders: list[str] = []
        with ExitStack() as locks:  # all or none: two jobs that each kept a part would deadlock
            for name, paths in choices:
                with ExitStack() as of_device:
                    holder = next(filter(None, (_lock(path, of_device) for path in paths)), None)
                    if holder is None:
                        chosen.append(name)
                        locks.enter_context(of_device.pop_all())
                    else:
                        holders.append(f"{name} by {holder}")
                if len(chosen) == wanted:
                    return chosen, locks.pop_all()
        if not told:
            told = True
            print(f"waiting for {wanted} free GPU(s): {'; '.join(holders)}", file=sys.stderr, flush=True)
        with waiting("a GPU slot"):
            time.sleep(_POLL_S)


def _lock(path: Path, held: ExitStack) -> str | None:
    """Lock a file until `held` closes and return None; if another process holds it, return that process."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    held.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(lock, 200).decode() or "another process"
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {platform.node()}".encode())
    return None
