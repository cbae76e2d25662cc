"""Runs the command line in a process of its own that kills itself (SIGKILL) at a chosen point.

The children are forked from a server process that has imported everything and trained nothing, so a kill costs
milliseconds. Nothing in the package knows of this: the child replaces functions of the library and of Python.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forks import FORK

Sabotage = Callable[[], None]


def run_apart(sabotage: Sabotage, arguments: list[str], log: Path) -> int:
    """Exit code of `tapernorm ARGUMENTS` in a process that first calls `sabotage` (picklable); stderr goes to `log`."""
    process = FORK.Process(target=_child, args=(sabotage, arguments, log))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def kill(sabotage: Sabotage, arguments: list[str], log: Path) -> str:
    """Run until the sabotage strikes, which it must; returns what it said where it struck."""
    code = run_apart(sabotage, arguments, log)
    assert code == -signal.SIGKILL, f"exit {code}: {log.read_text()}"
    return log.read_text().splitlines()[-1]


def _child(sabotage: Sabotage, arguments: list[str], log: Path) -> None:
    import torch

    from tapernorm_lab.cli.main import main

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    sabotage()
    os._exit(main(arguments))


def die(where: str) -> None:
    os.write(2, f"\nkilled {where}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def nothing() -> None:
    """No sabotage."""


def at_step(step: int, moment: str) -> None:
    """Die before optimizer step `step`, between its backward and its update, or after it, not yet logged."""
    import torch

    from tapernorm_lab.training.trainer import Trainer

    original = Trainer.step
    update = torch.optim.AdamW.step

    def dying_step(self: Trainer, k: int) -> dict[str, Any]:
        if k == step and moment == "before":
            die(f"before step {k}")
        if k == step and moment == "within":
            torch.optim.AdamW.step = lambda *_: die(f"within step {k}")
        row = original(self, k)
        if k == step and moment == "after":
            die(f"after step {k}")
        return row

    assert update is torch.optim.AdamW.step
    Trainer.step = dying_step


def in_evaluation(window: int) -> None:
    """Die before batch `window` of the validation, counted over all evaluations of the process."""
    from tapernorm_lab.training import validation_loss as evaluate

    original = evaluate.scoring_windows
    seen = 0

    def dying_windows(*args: Any, **options: Any) -> Any:
        nonlocal seen
        for item in original(*args, **options):
            if seen == window:
                die(f"in evaluation batch {window}")
            seen += 1
            yield item

    evaluate.scoring_windows = dying_windows


def at_operation(number: int) -> None:
    """Die at file operation `number`: before it, or half way through where it writes."""
    from tapernorm_lab.training.metrics import MetricsFile
    from tapernorm_lab.training.resume_checkpoints import HashedWriter

    count = 0

    def point(where: str) -> bool:
        nonlocal count
        count += 1
        return count > number

    def before(holder: Any, name: str) -> None:
        original = getattr(holder, name)

        def dying(*args: Any, **options: Any) -> Any:
            where = f"before {name} {args[0]}"
            if point(where):
                die(where)
            return original(*args, **options)

        setattr(holder, name, dying)

    def half_way(holder: Any, name: str) -> None:
        original = getattr(holder, name)

        def dying(target: Any, content: Any, *args: Any, **options: Any) -> Any:
            where = f"half way through {name} {target}"
            if point(where):
                original(target, content[: len(content) // 2], *args, **options)
                die(where)
            return original(target, content, *args, **options)

        setattr(holder, name, dying)

    copy = shutil.copyfile

    def dying_copy(source: Path, target: Path) -> Any:
        where = f"half way through copyfile {target}"
        if point(where):
            content = source.read_bytes()
            with open(target, "wb") as half:
                half.write(content[: len(content) // 2])
            die(where)
        return copy(source, target)

    for name in ("replace", "fsync", "unlink", "rmdir"):
        before(os, name)
    for holder, name in ((Path, "write_bytes"), (Path, "write_text"), (MetricsFile, "_write_all")):
        half_way(holder, name)
        before(holder, name)
    shutil.copyfile = dying_copy

    write = HashedWriter._write

    def dying_write(self: HashedWriter, content: memoryview) -> None:
        where = f"half way through a checkpoint's {self._file}"
        if len(content) > 4000 and point(where):  # of some 700 writes: what is in it, and the table at its end
            write(self, content[: len(content) // 2])
            die(where)
        write(self, content)

    HashedWriter._write = dying_write
