"""A SLURM of one node on the loopback interface, for as long as a test needs it.

It needs root and Debian's slurmctld, slurmd, slurm-client and munge. Daemons run in the foreground as children of the
test, with their state in a folder of its own; outside it there are munge's files under /run, and
/etc/slurm/slurm.conf (the Snakemake plugin drops SLURM_CONF from the jobs' environment), which must not exist before.
All of it is removed at the end. The node claims more memory than it has: what jobs ask for is for real clusters.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

CONFIGURATION = Path("/etc/slurm/slurm.conf")
_MARK = "# A test's cluster of one node; removed when the test ends."
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "munged", "mungekey")


def obstacle() -> str | None:
    """Why there can be no such cluster here, if so."""
    if os.geteuid() != 0:
        return "a SLURM of one's own needs root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)"
    if CONFIGURATION.exists() and not CONFIGURATION.read_text(encoding="utf-8").startswith(_MARK):
        return f"{CONFIGURATION} is this machine's own"
    return None


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Run the cluster, its state in `folder`; at the end its jobs and daemons are gone, and its configuration."""
    processors = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        control_port, node_port = _free_ports(2)
        munge = _make_munge_folder()
        stack.callback(shutil.rmtree, munge)
        CONFIGURATION.parent.mkdir(exist_ok=True)
        stack.callback(CONFIGURATION.unlink, missing_ok=True)
        CONFIGURATION.write_text(
            f"""{_MARK}
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
KillWait=20
ReturnToService=2
NodeName=localhost NodeAddr=127.0.0.1 CPUs={processors} RealMemory=1000000 State=UNKNOWN
PartitionName=main Nodes=localhost Default=YES MaxTime=INFINITE State=UP
""",
            encoding="utf-8",
        )
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        stack.enter_context(_daemon(folder, ["munged", "--foreground", *_munge(munge)], user="munge"))
        _wait_for(lambda: (munge / "socket").exists(), "munged's socket")
        stack.enter_context(_daemon(folder, ["slurmctld", "-D"]))
        stack.enter_context(_daemon(folder, ["slurmd", "-D", "-N", "localhost"]))
        _wait_for(lambda: "idle" in _said("sinfo", "--noheader", "--format=%t"), "an idle node")
        stack.callback(_end_jobs)
        yield


def jobs() -> list[str]:
    """Numbers of the jobs that are queued, running or ending."""
    return _said("squeue", "--noheader", "--format=%i").split()


def _end_jobs() -> None:
    for number in jobs():
        subprocess.run(["scancel", number], check=True)
    _wait_for(lambda: not jobs(), "the end of all jobs")


@contextmanager
def _daemon(folder: Path, command: list[str], user: str = "root") -> Iterator[None]:
    """Run a daemon in the foreground, its messages in `folder`; stopped at the end."""
    with open(folder / f"{command[0]}.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, user=user, group=user, extra_groups=[], cwd="/")
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=30)


def munge_folder() -> Path:
    """Where munged's files of this process's cluster lie; one that was killed leaves its own behind."""
    return Path("/run") / f"test-munge-{os.getpid()}"


def _make_munge_folder() -> Path:
    """A key and places for munged, which insists on folders that nobody else can write to, up to the root."""
    munge = munge_folder()
    munge.mkdir(mode=0o755)
    subprocess.run(["mungekey", "--create", f"--keyfile={munge}/key"], check=True)
    for path in (munge, munge / "key"):
        shutil.chown(path, "munge", "munge")
    return munge


def _munge(folder: Path) -> list[str]:
    named = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    return [f"--{option}={folder / name}" for option, name in named.items()]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _wait_for(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come in {seconds:.0f} s")
        time.sleep(0.05)
