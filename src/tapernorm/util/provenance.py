"""The provenance of a result: code, package versions, platform and time."""

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
    """Return code commit, package versions, platform, host and time, and the caller's own facts `more`.

    `wall_time_s` counts from the moment at which this process imported the package. A resumed job counts its last
    process alone.
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
    """Return the CPU kernels that PyTorch uses, such as AVX2: they affect the last digits. Empty without PyTorch."""
    torch = sys.modules.get("torch")  # a job that does not use torch need not import it
    return {} if torch is None else {"kernels": torch.backends.cpu.get_cpu_capability()}


def host_hash() -> str:
    """Return the first 12 hex digits of the sha256 of the host name: it distinguishes machines and names none."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def code_commit() -> str | None:
    """Return the commit of the checkout that contains this package, or None outside git.

    The commit ends in `+dirty` if files beside this package or inside it were edited.
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
