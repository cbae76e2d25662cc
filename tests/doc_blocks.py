"""The code blocks of a page, and running them."""

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

from places import ROOT

from tapernorm_lab.cli.main import main

SHORTER = {"--steps 300": "--steps 10 --batch 2 --threads 1", "max_steps=300": "max_steps=12, use_cpu=True"}


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, code) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def run(line: str) -> None:
    command, *words = shlex.split(line)
    if command == "tapernorm":
        assert main(words) == 0, line
    else:
        assert command == "python", line
        sys.argv = words
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def play(language: str, code: str, known: dict[str, Any], shorter: dict[str, str] = SHORTER) -> None:
    """Run one block; what it defines is left in `known`."""
    for long, short in shorter.items():
        code = code.replace(long, short)
    if language == "python":
        exec(code, known)
        return
    assert language == "sh"
    for line in code.strip().splitlines():
        run(line)
