"""Where a number comes from: code, versions, device, time."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import __version__

_PACKAGES = ("torch", "numpy", "sentencepiece", "datasets", "transformers", "pandas", "snakemake")


def provenance(**more: Any) -> dict[str, Any]:
    """Code commit, package versions, platform and time, plus the caller's own facts (config hash, device, seed)."""
    return {
        "tapernorm": __version__,
        "commit": code_commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: v for name in _PACKAGES if (v := _version(name))},
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **more,
    }


def code_commit() -> str | None:
    """Commit of the checkout that this package runs from, with `+dirty` after local edits; None outside git."""
    folder = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    if head is None or git("ls-files", "--error-unmatch", "provenance.py") is None:
        return None
    return head + ("+dirty" if git("status", "--porcelain", "--untracked-files=no", "--", str(folder)) else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
