"""Options that several verbs share, and the job that they name."""

import argparse
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tapernorm.util.atomic_files import parse_json, read_json
from tapernorm.util.errors import UserError

from ..config.load import faults_named, load_config, parse
from ..config.run import Config
from ..config.sections import NAME, NAME_LENGTH, RUN_NAME, HardwareConfig, Strict
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

    def add(self, run: Verb, summary: str, table: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
        """A verb named as the function that it runs, with the options of `table`, as `options` takes it."""
        self._parser.epilog = f"{self._parser.epilog or ''}  {run.__name__:<10} {summary}\n"
        made = self._parsers.add_parser(run.__name__, description=summary[0].upper() + summary[1:] + ".")
        made.set_defaults(verb=run, written=[])
        options(made, table or {})
        return made


# The types of options, by the name of their value


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of an option that is an integer from `least` to `most`."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(
                f"{value} is {'not a positive number' if least == 1 else f'below {least}'}"
            )
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is above {most}")
        return value

    return number


def path(text: str) -> Path:
    """The type of an option that names a file or folder; an empty name would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty: give a file or folder")
    return Path(text)


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


def cpus(text: str) -> int:
    """How many CPUs, of those of this machine."""
    return whole(1, most_threads())(text)


_TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("DIR", "FILE"), path),
    **dict.fromkeys(("N", "D", "K"), whole(1)),
    **dict.fromkeys(("STEPS", "ROWS", "TOKENS", "SEED", "THREADS"), int),  # of a request, whose ranges are its own
    "CPUS": cpus,
    "S": whole(0, 2**63 - 1),
    "X": float,
    "F": positive_real,
    "RUN": run_name,
}
_OPTION = re.compile(r"(\S+?)(?: (.+?))?([+*?])?(?::(\S+))?(!)?")


def options(made: argparse._ActionsContainer, table: Mapping[str, str]) -> None:
    """Add options: how each is typed -> its help.

    `--name` is a switch, `--name VALUE` takes a value whose type goes by its name (`_TYPES`), `--name a|b` takes one of
    these words. After it come `+`, `*` or `?` for several, `:X` for a default, and `!` where the option must be given.
    A word without dashes is an argument by its place.
    """
    for written, said in table.items():
        found = _OPTION.fullmatch(written)
        assert found is not None, written
        name, value, many, default, required = found.groups()
        more: dict[str, Any] = {"help": said.replace("%", "%%") or None}
        if many:
            more["nargs"] = many
        if required:
            more["required"] = True
        if value is None and name.startswith("-"):
            more["action"] = "store_true"
        elif value is not None and "|" in value:
            more |= {"choices": value.split("|"), "default": default}
        else:
            kind = _TYPES.get(value or name, str)
            more |= {"metavar": value or name, "type": kind, "default": None if default is None else kind(default)}
        made.add_argument(name if name.startswith("-") else name.lower(), **more)


DEVICE = {
    "--device auto|cpu|cuda:auto": "",
    "--jobs-per-gpu N:1": "that share one GPU, as hardware.jobs_per_gpu",
    "--threads CPUS:1": "CPU threads",
}
TRAINING = {
    "--hardware JSON": "hardware section of a config: needed with --job, and in place of the one in --config",
    "--threads CPUS": "CPU threads, in place of hardware.threads",
    "--kernels FILE": "what `tapernorm bench linear` wrote: the kernel that it chose, in place of hardware.linear",
}
OVERWRITE = {"--overwrite": "delete what another job of this verb wrote into --out; nothing else"}


def config_options(made: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The options that name a job: a config that has it, or the job itself."""
    source = made.add_mutually_exclusive_group(required=required)
    source.add_argument("--config", metavar="FILE", help="config of a run, such as config/demo.yaml")
    source.add_argument("--job", metavar="JSON", help="exactly the settings of this job, as the workflow gives them")
    set_option(made)


def set_option(made: argparse.ArgumentParser) -> None:
    made.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override one config setting")


def stands_for(made: argparse.ArgumentParser, **names: str) -> None:
    """Name options in messages in place of the config keys that they stand for (section__key)."""
    named = {key.replace("__", "."): option for key, option in names.items()}
    made.set_defaults(option_names={**(made.get_default("option_names") or {}), **named})


@contextmanager
def writes(arguments: argparse.Namespace, *names: str) -> Iterator[None]:
    """Claim the files that a verb writes inside: `names` in the folder --out, or --out itself.

    Raises:
        UserError: one of them is there, and tapernorm did not write it.
    """
    files = [arguments.out / name for name in names] or [arguments.out]
    with output_files(files, arguments.verb.__name__):
        yield
    arguments.written.extend(files)


# What belongs together


def require_options(
    arguments: argparse.Namespace,
    what: str,
    *,
    needs: Collection[str] = (),
    may: Collection[str] = (),
    of: Collection[str],
) -> None:
    """Raise UserError unless `what` comes with the options of `needs`, and of the options `of` only with those it may.

    Options are named as in `arguments`.
    """
    values = {name: getattr(arguments, name) for name in (*of, *needs)}
    given = {name for name, value in values.items() if value is not None and value is not False and value != []}
    if missing := [name for name in needs if name not in given]:
        raise UserError(f"{what} needs {_typed(missing)}: name it")
    if wrong := [name for name in of if name in given and name not in (*needs, *may)]:
        raise UserError(f"{what} takes no {_typed(wrong)}: leave it out")


def _typed(names: Collection[str]) -> str:
    places = {"name": "NAME", "result": "RESULT"}
    return ", ".join(places.get(name, f"--{name.replace('_', '-')}") for name in names)


def cell_of(arguments: argparse.Namespace, *names: str) -> tuple[Any, ...]:
    """The options that choose one job of a --config file; all of them are needed there, and none with a --job.

    Raises:
        UserError: some are missing, or given with a --job.
    """
    if arguments.job is not None:
        require_options(arguments, "a --job, which names its own settings,", of=names)
    elif arguments.config is not None:
        require_options(arguments, "--config", needs=names, of=names)
    return tuple(getattr(arguments, name) for name in names)


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


def hardware_of(
    arguments: argparse.Namespace, cut: Callable[[Config], HardwareConfig] = lambda config: config.hardware
) -> HardwareConfig:
    """The hardware given as JSON, or cut from the config file, with --threads and the kernel of --kernels on top."""
    if arguments.hardware is not None:
        hardware = parse(HardwareConfig, from_json(arguments.hardware, "--hardware"), "--hardware")
    elif arguments.config is not None:
        hardware = cut(load_config(arguments.config, arguments.set))
    else:
        raise UserError("--job needs --hardware: the hardware section of a config, as JSON")
    given = {} if arguments.threads is None else {"threads": arguments.threads}
    if arguments.kernels is not None:
        given["linear"] = read_kernel(arguments.kernels)
    return hardware.model_copy(update=given)


def read_kernel(file: Path) -> str:
    """The kernel of linear maps that `tapernorm bench linear` chose.

    Raises:
        UserError: there is no such file, or it holds no choice.
    """
    found = read_json(file) if file.is_file() else None
    if not isinstance(found, dict) or found.get("linear") not in ("aten", "onednn"):
        raise UserError(f"--kernels {file} holds no kernel of linear maps: make it with `tapernorm bench linear`")
    return found["linear"]


def named_folders(given: list[str], option: str) -> dict[str, Path]:
    """NAME=DIR options as a mapping.

    Raises:
        UserError: one is written otherwise, or a name is given twice.
    """
    found: dict[str, Path] = {}
    for words in given:
        name, folder = named(words, option, "DIR")
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


def from_json(text: str, option: str) -> object:
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{option} is not JSON ({error}): quote it as one argument") from None


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
