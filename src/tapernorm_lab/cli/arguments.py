"""Options that several verbs share, and the job that they name."""

import argparse
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tapernorm.util.atomic_files import parse_json
from tapernorm.util.errors import UserError

from ..config.load import faults_named, load_config, parse
from ..config.run import Config
from ..config.sections import (
    NAME,
    NAME_LENGTH,
    RUN_NAME,
    HardwareConfig,
    Strict,
)
from ..training.gpu_slots import most_threads
from ..training.outputs import output_files

Job = TypeVar("Job", bound=Strict)
Verb = Callable[[argparse.Namespace], int | None]  # returns the exit code, where it is not 0


class Parser(argparse.ArgumentParser):
    """A parser that tells of an option's fault in one line, and of any other with the usage."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("argument -"):
            self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")
        super().error(message)


class Verbs:
    """The verbs of the command line, as they are added, in groups."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
        self._parser = parser

    def group(self, title: str) -> None:
        """Start a group of verbs in the help."""
        self._parser.epilog = f"{self._parser.epilog or ''}\n{title}:\n"

    def add(self, run: Verb, summary: str) -> argparse.ArgumentParser:
        """A verb named as the function that it runs."""
        self._parser.epilog = f"{self._parser.epilog or ''}  {run.__name__:<10} {summary}\n"
        made = self._parsers.add_parser(run.__name__, description=summary[0].upper() + summary[1:] + ".")
        made.set_defaults(verb=run)
        return made


def config_options(made: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The options that name a job: a config that has it, or the job itself."""
    source = made.add_mutually_exclusive_group(required=required)
    source.add_argument("--config", metavar="FILE", help="config of a run, such as config/demo.yaml")
    source.add_argument("--job", metavar="JSON", help="exactly the settings of this job, as the workflow gives them")
    made.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override one config setting")


def folders(made: argparse.ArgumentParser, **options: str) -> None:
    """Required options that name a folder."""
    for name, what in options.items():
        made.add_argument(f"--{name}", metavar="DIR", type=path, required=True, help=what)


def stands_for(made: argparse.ArgumentParser, **options: str) -> None:
    """Name options in messages in place of the config keys that they stand for (section__key)."""
    named = {key.replace("__", "."): option for key, option in options.items()}
    made.set_defaults(option_names={**(made.get_default("option_names") or {}), **named})


def device(made: argparse.ArgumentParser) -> None:
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    stands_for(made, hardware__device="--device")


def slots(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--jobs-per-gpu", type=positive, default=1, metavar="N", help="that share one GPU, as hardware.jobs_per_gpu"
    )


def threads(made: argparse.ArgumentParser) -> None:
    made.add_argument("--threads", type=thread_count, default=1, metavar="N", help="CPU threads")


def output(made: argparse.ArgumentParser, what: str) -> None:
    """A folder of its own that a verb writes, and the leave to replace another job's."""
    made.add_argument("--out", metavar="DIR", type=path, required=True, help=what)
    made.add_argument(
        "--overwrite", action="store_true", help="delete what another job of this verb wrote into --out; nothing else"
    )


def writes(out: Path, verb: str, *names: str) -> AbstractContextManager[None]:
    """Claim the files that a verb writes: `names` in the folder `out`, or `out` itself.

    Raises:
        UserError: one of them is there, and tapernorm did not write it.
    """
    return output_files([out / name for name in names] or [out], verb)


def training(made: argparse.ArgumentParser) -> None:
    """What every training verb takes besides its job."""
    made.add_argument("--hardware", metavar="JSON", help="with --job: the hardware section of a config")
    made.add_argument("--threads", type=thread_count, metavar="N", help="CPU threads, in place of hardware.threads")


def cell_of(arguments: argparse.Namespace, *names: str) -> tuple[Any, ...]:
    """The options that choose one job of a --config file; all of them are needed there, and none with a --job.

    Raises:
        UserError: some are missing, or given with a --job.
    """
    given = [getattr(arguments, name) for name in names]
    options = ", ".join(f"--{name}" for name in names)
    if arguments.job is not None and any(value is not None for value in given):
        raise UserError(f"{options} choose a job of a --config file; a --job names its own")
    missing = [f"--{name}" for name, value in zip(names, given, strict=True) if value is None]
    if arguments.config is not None and missing:
        raise UserError(f"--config needs {', '.join(missing)}: which job of the run is meant")
    return tuple(given)


def job_of(arguments: argparse.Namespace, kind: type[Job], cut: Callable[[Config], Job], *others: type[Job]) -> Job:
    """The job given as JSON, or cut from the config file.

    Args:
        others: further kinds that the job may be of; JSON is of the kind whose settings it shares most of.
    """
    if arguments.job is None and arguments.config is None:
        raise UserError("name the config of the run with --config")
    if arguments.job is not None:
        if arguments.set:
            raise UserError("--set changes a --config file; it does nothing to a --job")
        raw = from_json(arguments.job, "--job")
        keys = set(raw) if isinstance(raw, dict) else kind.model_fields.keys()
        return parse(min((kind, *others), key=lambda one: len(keys ^ one.model_fields.keys())), raw, "--job")
    config = load_config(arguments.config, arguments.set)
    with faults_named(kind, arguments.config):
        return cut(config)


def require_inputs(job: str, given: Mapping[str, object], needed: Collection[str]) -> None:
    """Raise UserError unless, of the options `given` by name, just those are there that a job of this kind needs."""
    missing = [f"--{name}" for name in needed if given[name] is None]
    wrong = [f"--{name}" for name, value in given.items() if value is not None and name not in needed]
    if missing:
        raise UserError(f"{job} is made from {', '.join(missing)}: name it")
    if wrong:
        raise UserError(f"{job} takes no {', '.join(wrong)}: leave it out")


def hardware_of(
    arguments: argparse.Namespace, cut: Callable[[Config], HardwareConfig] = lambda config: config.hardware
) -> HardwareConfig:
    """The hardware given as JSON, or cut from the config file, with --threads on top."""
    if arguments.hardware is not None:
        hardware = parse(HardwareConfig, from_json(arguments.hardware, "--hardware"), "--hardware")
    elif arguments.config is not None:
        hardware = cut(load_config(arguments.config, arguments.set))
    else:
        raise UserError("--job needs --hardware: the hardware section of a config, as JSON")
    return hardware if arguments.threads is None else hardware.model_copy(update={"threads": arguments.threads})


def named_folders(options: list[str], option: str) -> dict[str, Path]:
    """NAME=DIR options as a mapping.

    Raises:
        UserError: one is written otherwise, or a name is given twice.
    """
    found: dict[str, Path] = {}
    for given in options:
        name, folder = named(given, option, "DIR")
        if name in found:
            raise UserError(f"{option}: {name!r} is given twice")
        found[name] = Path(folder)
    return found


def named(given: str, option: str, what: str) -> tuple[str, str]:
    """The two sides of a NAME=... option. The name names folders and files.

    Raises:
        UserError: it is written otherwise, or the name could lead elsewhere or is too long.
    """
    name, equals, value = given.partition("=")
    if not equals or not value or not NAME.fullmatch(name):
        rule = f"write it as NAME={what}, the name in letters, digits, underscores and dashes"
        raise UserError(f"{option} {_shortened(given)}: {rule}")
    if len(name.encode()) > NAME_LENGTH:
        raise UserError(f"{option} {_shortened(given)}: the name has more than {NAME_LENGTH} bytes; shorten it")
    return name, value


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of an option that is an integer from `least` to `most`."""

    below = "not a positive number" if least == 1 else f"below {least}"

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is {below}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is above {most}")
        return value

    return number


def path(text: str) -> Path:
    """The type of an option that names a file or folder; an empty name would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty: give a file or folder")
    return Path(text)


positive = whole(1)
seed = whole(0, 2**63 - 1)


def thread_count(text: str) -> int:
    return whole(1, most_threads())(text)


def positive_real(text: str) -> float:
    """The type of an option that is a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def run_name(text: str) -> str:
    """The type of an option that names a run."""
    if not re.fullmatch(RUN_NAME, text) or len(text) > NAME_LENGTH:
        raise argparse.ArgumentTypeError(
            f"{_shortened(text)} is no name of a run: up to {NAME_LENGTH} letters, digits, dots, underscores and dashes"
        )
    return text


def from_json(text: str, option: str) -> object:
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{option} is not JSON ({error}): quote it as one argument") from None
