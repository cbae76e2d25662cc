"""The command line `tapernorm VERB`: its parser, its exit codes, and one line for each error."""

import argparse
import errno
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from tapernorm import __version__
from tapernorm.util.atomic_files import REASONS
from tapernorm.util.errors import UserError, settings_named

from ..training.run_lock import seconds_waited
from ..training.stop_signals import Stopped, stoppable

_REASONS = REASONS | {errno.ENOENT: "give the path of an existing file or folder"}
_EXTRAS = {  # package -> the extra that installs it; `workflow` installs all others
    **dict.fromkeys(("pydantic", "yaml", "tqdm"), "lab"),
    **dict.fromkeys(("transformers", "tokenizers", "huggingface_hub"), "hf"),
    "rocrate": "crate",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code.

    0: done. 2: refused; one line names the fault and the remedy. 3: done, but one form of the export failed.
    128 + N: stopped by signal N.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    for word in words:
        if not _is_text(word):
            print(
                f"tapernorm: the argument {word!a} is not UTF-8: rename the file, or correct the text", file=sys.stderr
            )
            return 2
    try:
        arguments = _parser().parse_args(words, argparse.Namespace(words=words))
        began = time.monotonic()
        with stoppable(), settings_named(getattr(arguments, "option_names", {})):
            code = arguments.verb(arguments) or 0
            sys.stdout.flush()
        _tell(arguments, time.monotonic() - began)
        return code
    except UserError as error:
        print(f"tapernorm: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe; Python flushes stdout again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _REASONS:
            raise
        print(f"tapernorm: {error} ({_REASONS[error.errno]})", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("tapernorm", "tapernorm_lab"):
            raise
        extra = _EXTRAS.get(package, "workflow")
        remedy = f"run `pip install '.[{extra}]'` in the checkout"
        print(f"tapernorm: the package {package} is missing: {remedy}", file=sys.stderr)
        return 2
    except Stopped as stop:
        print(f"tapernorm: {stop}", file=sys.stderr)
        return stop.exit_code


def _tell(arguments: argparse.Namespace, took_s: float) -> None:
    """Print in one line what a verb wrote and how long it took; in a log, also how long it waited.

    Of several ranks, only their launcher prints it.
    """
    folder = None if getattr(arguments, "dry_run", False) else getattr(arguments, "out", None)
    written = arguments.written or ([] if folder is None else [folder])
    if not written or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    names: dict[Path, list[str]] = {}
    for path in dict.fromkeys(written):
        names.setdefault(path.parent, []).append(path.name)
    told = "; ".join(str(place / of[0]) if len(of) == 1 else f"{place}: {', '.join(of)}" for place, of in names.items())
    took = f"{took_s:.1f} s" if took_s < 60 else str(timedelta(seconds=round(took_s)))
    if not sys.stderr.isatty():  # the log of a job
        waits = ", ".join(f"{seconds:.1f} s for {what}" for what, seconds in seconds_waited().items())
        took = f"ran {took}, of which it waited {waits}"
    print(f"tapernorm {arguments.verb.__name__}: output in {told} ({took})", file=sys.stderr)


def _is_text(word: str) -> bool:
    """Whether the bytes of an argument are UTF-8."""
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs. It imports the lab here, because only an extra installs the lab's packages."""
    from . import data, models, own_model, report, runs, training
    from .arguments import Verbs

    parser = argparse.ArgumentParser(
        prog="tapernorm",
        description="Gated removal of normalization from pre-norm Transformers (arXiv 2602.10408).\n"
        "Each verb is one step of the pipeline, and `snakemake` runs them all.\n"
        "`tapernorm VERB --help` lists the options of a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = Verbs(parser)
    groups = {
        "text and tokens": data,
        "training": training,
        "trained models": models,
        "a model of your own": own_model,
        "rows, tables and figures": report,
        "whole runs": runs,
    }
    for title, module in groups.items():
        verbs.group(title)
        module.add(verbs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
