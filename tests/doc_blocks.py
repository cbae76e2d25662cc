"""The code blocks of a page: those that run, and those that a comment before them marks as too dear to run."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from places import ROOT

from tapernorm_lab.cli.main import _parser, main

SHORTER = {"--steps 300": "--steps 10 --batch 2 --threads 1", "max_steps=300": "max_steps=12, use_cpu=True"}
_BIN = Path(sys.executable).parent


class Block(NamedTuple):
    """A fenced block. `mark`: `dry run` or `parser`, how it is checked instead; `needs` what a test provides; or ""."""

    language: str
    code: str
    mark: str = ""

    @property
    def commands(self) -> list[str]:
        """Its lines as one command each, without comments."""
        lines = [line.partition("  #")[0].strip() for line in self.code.replace("\\\n", " ").splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """Every fenced block."""
    fence = r"^(?:<!-- (dry run|parser|needs)\b[^\n]* -->\n)?```(\w*)\n(.*?)^```$"
    found = re.findall(fence, page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [Block(language, code, mark) for mark, language, code in found]


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in ("sh", "python") and not block.mark]


def run(line: str) -> None:
    """One command of a page in this process, in the working folder."""
    command, *words = shlex.split(line)
    if command == "make":  # of a published run: what its recipe does
        target, name = words[0], words[1].removeprefix("RUN=")
        crate = ["compare", "--run", name, "--crate", f"results/{name}/ro-crate.zip"]
        command, words = "tapernorm", {"figures": ["figure", "--published", name], "crate": crate}[target]
    if command == "tapernorm":
        assert main(words) == 0, line
    elif command == "python":
        sys.argv = words
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    else:
        assert command == "snakemake", line
        shell(line)


def shell(line: str, folder: Path = ROOT) -> None:
    path = os.pathsep.join([str(_BIN), os.environ["PATH"]])
    command = ["bash", "-c", line]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def play(block: Block, known: dict[str, Any], shorter: dict[str, str] = SHORTER) -> None:
    """Run one block; what it defines is left in `known`."""
    code = block.code
    for long, short in shorter.items():
        code = code.replace(long, short)
    if block.language == "python":
        exec(code, known)
        return
    for line in Block("sh", code).commands:
        run(line)


def check_unrun(line: str, mark: str) -> None:
    """What stands in for running `line`: its dry run, or else the parser of the command line and of bash."""
    command, *words = shlex.split(line)
    if command == "tapernorm":
        _parser().parse_args(words)
    elif mark == "dry run" and command == "make":
        shell(f"make --dry-run {shlex.join(words)}")
    elif mark == "dry run" and command == "snakemake":
        shell(f"{line} --dry-run --nolock --quiet")
    else:
        shell(f"bash -n -c {shlex.quote(line)}")
