"""Where a number comes from: code, versions, device, time."""

import hashlib
import platform
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__

_LOADED = time.monotonic()
_PACKAGES = ("torch", "numpy", "sentencepiece", "datasets", "transformers", "pandas", "snakemake")


def provenance(**more: Any) -> dict[str, Any]:
    """Code commit, package versions, platform, host and time, plus the caller's own facts (config hash, device, seed).

    `wall_time_s` counts from when this process loaded the package: of a resumed job, its last process alone.
    """
    return {
        "tapernorm": __version__,
        "commit": code_commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **_kernels(),
        "host": host_hash(),
        "packages": {name: v for name in _PACKAGES if (v := _version(name))},
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_time_s": round(time.monotonic() - _LOADED, 3),
        **more,
    }


def _kernels() -> dict[str, str]:
    """Which CPU kernels PyTorch runs, such as AVX2: they decide the last digits. Empty where it is not loaded."""
    torch = sys.modules.get("torch")  # a job that does without it has no kernels, and need not wait for it
    return {} if torch is None else {"kernels": torch.backends.cpu.get_cpu_capability()}


def host_hash() -> str:
    """First 12 hex digits of the sha256 of this machine's name: tells machines apart, names none."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def code_commit() -> str | None:
    """Commit of the checkout that this package runs from, with `+dirty` after edits of it or its neighbours.

    None outside git.
    """
    folder = Path(__file__).parent
    packages = folder.parents[1]

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    if head is None or git("ls-files", "--error-unmatch", "provenance.py") is None:
        return None
    return head + ("+dirty" if git("status", "--porcelain", "--untracked-files=no", "--", str(packages)) else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
