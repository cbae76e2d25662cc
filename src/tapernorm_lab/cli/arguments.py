"""The options that several verbs share, and the job that these options name."""

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
    """A parser that reports a faulty option in one line, and any other fault together with the usage."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("argument -"):
            self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")
        super().error(message)


class Verbs:
    """The verbs of the command line, listed by group in the help."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
        self._parser = parser

    def group(self, title: str) -> None:
        """Start a group of verbs in the help."""
        self._parser.epilog = f"{self._parser.epilog or ''}\n{title}:\n"

    def add(self, run: Verb, summary: str, table: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
        """Add a verb with the name of the function `run` and the options in `table`, which `options` describes."""
        self._parser.epilog = f"{self._parser.epilog or ''}  {run.__name__:<10} {summary}\n"
        made = self._parsers.add_parser(run.__name__, description=summary[0].upper() + summary[1:] + ".")
        made.set_defaults(verb=run, written=[])
        options(made, table or {})
        return made


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Return the type of an option that is an integer from `least` to `most`."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}: give {least} or more")
        if value > most:
            raise argparse.ArgumentTypeError(f"{value} is above {most}: give {most} or less")
        return value

    return number


def path(text: str) -> Path:
    """Parse an option that names a file or folder. `Path` would read an empty name as the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty: give a file or folder")
    return Path(text)


def positive_real(text: str) -> float:
    """Parse an option that is a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is out of range: give a finite number above 0")
    return value


def run_name(text: str) -> str:
    """Parse an option that names a run."""
    if not re.fullmatch(RUN_NAME, text) or len(text) > NAME_LENGTH:
        raise argparse.ArgumentTypeError(
            f"{_shortened(text)} cannot name a run: give up to {NAME_LENGTH} letters, digits, dots, underscores, dashes"
        )
    return text


def cpus(text: str) -> int:
    """Parse a number of CPU threads, from 1 to what this machine allows."""
    return whole(1, most_threads())(text)


_TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("DIR", "FILE"), path),
    **dict.fromkeys(("N", "D", "K"), whole(1)),
    **dict.fromkeys(("STEPS", "ROWS", "TOKENS", "SEED", "THREADS"), int),  # `own_model.options` checks their ranges
    "CPUS": cpus,
    "S": whole(0, 2**63 - 1),
    "X": float,
    "F": positive_real,
    "RUN": run_name,
}
_OPTION = re.compile(r"(\S+?)(?: (.+?))?([+*?])?(?::(\S+))?(!)?")


def options(made: argparse._ActionsContainer, table: Mapping[str, str]) -> None:
    """Add the options of `table`, which maps the notation of each option to its help.

    `--name` is a switch. `--name VALUE` takes a value of the type in `_TYPES`. `--name a|b` takes one of these words.
    A suffix `+`, `*` or `?` sets the number of values, `:X` sets a default, and `!` makes the option required.
    A name without dashes is a positional argument. The help ends with the default, where there is one.
    """
    for written, said in table.items():
        found = _OPTION.fullmatch(written)
        assert found is not None, written
        name, value, many, default, required = found.groups()
        shown = said if default is None else f"{said}; default: {default}"
        more: dict[str, Any] = {"help": shown.replace("%", "%%")}
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


ON_DEVICE = "where to compute; auto: on a GPU if there is one"
PER_GPU = "number of jobs that may share one GPU, as hardware.jobs_per_gpu"
THREADS = "number of CPU threads"
DEVICE = {"--device auto|cpu|cuda:auto": ON_DEVICE, "--jobs-per-gpu N:1": PER_GPU, "--threads CPUS:1": THREADS}
TRAINING = {
    "--hardware JSON": "a config's hardware section; required with --job; with --config: replaces the file's section",
    "--threads CPUS": "number of CPU threads; replaces hardware.threads",
    "--kernels FILE": "file that `tapernorm bench linear` wrote; its kernel replaces hardware.linear",
}
OVERWRITE = {"--overwrite": "delete the files that another job of this verb wrote into --out, and no others"}


def config_options(made: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options that name a job: --config or --job, and --set."""
    source = made.add_mutually_exclusive_group(required=required)
    source.add_argument("--config", metavar="FILE", help="config file of a run, such as config/demo.yaml")
    source.add_argument("--job", metavar="JSON", help="the settings of this job alone, as the workflow passes them")
    set_option(made)


def set_option(made: argparse.ArgumentParser) -> None:
    """Add --set."""
    said = "replace one setting of --config, such as train.lr=1e-3; may be repeated"
    made.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help=said)


def stands_for(made: argparse.ArgumentParser, **names: str) -> None:
    """Make messages name an option in place of the config key that it sets, given as section__key."""
    named = {key.replace("__", "."): option for key, option in names.items()}
    made.set_defaults(option_names={**(made.get_default("option_names") or {}), **named})


@contextmanager
def writes(arguments: argparse.Namespace, *names: str) -> Iterator[None]:
    """Claim the files that a verb writes: `names` in the folder --out, or the file --out without `names`.

    Raises:
        UserError: one of the files exists, and tapernorm did not write it.
    """
    files = [arguments.out / name for name in names] or [arguments.out]
    with output_files(files, arguments.verb.__name__):
        yield
    arguments.written.extend(files)


def require_options(
    arguments: argparse.Namespace,
    what: str,
    *,
    needs: Collection[str] = (),
    may: Collection[str] = (),
    of: Collection[str],
) -> None:
    """Check the options that `what` needs and those that it may take. Options are named as in `arguments`.

    Args:
        what: the subject of the message.
        needs: options that must be given.
        may: options that may be given besides.
        of: all options that are checked; any other option is left alone.

    Raises:
        UserError: an option of `needs` is missing, or one of `of` is given that is in neither `needs` nor `may`.
    """
    values = {name: getattr(arguments, name) for name in (*of, *needs)}
    given = {name for name, value in values.items() if value is not None and value is not False and value != []}
    if missing := [name for name in needs if name not in given]:
        raise UserError(f"{what} needs {_typed(missing)}: add it")
    if wrong := [name for name in of if name in given and name not in (*needs, *may)]:
        raise UserError(f"{what} takes no {_typed(wrong)}: remove it")


def _typed(names: Collection[str]) -> str:
    places = {"name": "NAME", "result": "RESULT"}
    return ", ".join(places.get(name, f"--{name.replace('_', '-')}") for name in names)


def cell_of(arguments: argparse.Namespace, *names: str) -> tuple[Any, ...]:
    """Return the values of the options that choose one job of a --config file.

    Raises:
        UserError: one is missing beside --config, or given beside --job.
    """
    if arguments.job is not None:
        require_options(arguments, "a --job, which holds all settings,", of=names)
    elif arguments.config is not None:
        require_options(arguments, "--config", needs=names, of=names)
    return tuple(getattr(arguments, name) for name in names)


def job_of(arguments: argparse.Namespace, kind: type[Job], cut: Callable[[Config], Job], *others: type[Job]) -> Job:
    """Return the job that --job gives as JSON, or that `cut` takes from the --config file.

    Args:
        others: further classes that the job may have. JSON gets the class whose field names differ least from its keys.
    """
    if arguments.job is None and arguments.config is None:
        raise UserError("no job is named: give the config of the run with --config")
    if arguments.job is not None:
        if arguments.set:
            raise UserError("--set changes a --config file, not a --job: change the JSON of --job")
        raw = from_json(arguments.job, "--job")
        keys = set(raw) if isinstance(raw, dict) else kind.model_fields.keys()
        return parse(min((kind, *others), key=lambda one: len(keys ^ one.model_fields.keys())), raw, "--job")
    config = load_config(arguments.config, arguments.set)
    with faults_named(kind, arguments.config):
        return cut(config)


def hardware_of(
    arguments: argparse.Namespace, cut: Callable[[Config], HardwareConfig] = lambda config: config.hardware
) -> HardwareConfig:
    """Return the hardware in --hardware, or what `cut` takes from the config file. --threads and --kernels override."""
    if arguments.hardware is not None:
        hardware = parse(HardwareConfig, from_json(arguments.hardware, "--hardware"), "--hardware")
    elif arguments.config is not None:
        hardware = cut(load_config(arguments.config, arguments.set))
    else:
        raise UserError("--job needs --hardware: add the hardware section of a config, as JSON")
    given = {} if arguments.threads is None else {"threads": arguments.threads}
    if arguments.kernels is not None:
        given["linear"] = read_kernel(arguments.kernels)
    return hardware.model_copy(update=given)


def read_kernel(file: Path) -> str:
    """Return the kernel of linear maps that `tapernorm bench linear` chose.

    Raises:
        UserError: the file does not exist, or it names no kernel.
    """
    found = read_json(file) if file.is_file() else None
    if not isinstance(found, dict) or found.get("linear") not in ("aten", "onednn"):
        raise UserError(f"--kernels {file} holds no kernel of linear maps: make it with `tapernorm bench linear`")
    return found["linear"]


def named_folders(given: list[str], option: str) -> dict[str, Path]:
    """Parse NAME=DIR values into a mapping.

    Raises:
        UserError: a value has another form, or a name occurs twice.
    """
    found: dict[str, Path] = {}
    for words in given:
        name, folder = named(words, option, "DIR")
        if name in found:
            raise UserError(f"{option}: {name!r} is given twice: rename one")
        found[name] = Path(folder)
    return found


def named(given: str, option: str, what: str) -> tuple[str, str]:
    """Split a NAME=... value into its name and the rest. The name becomes a file or folder name.

    Raises:
        UserError: the value has another form, or the name is too long or has a character that a path would interpret.
    """
    name, equals, value = given.partition("=")
    if not equals or not value or not NAME.fullmatch(name):
        rule = f"write it as NAME={what}, with letters, digits, underscores and dashes in the name"
        raise UserError(f"{option} {_shortened(given)}: {rule}")
    if len(name.encode()) > NAME_LENGTH:
        raise UserError(f"{option} {_shortened(given)}: the name has more than {NAME_LENGTH} bytes; shorten it")
    return name, value


def from_json(text: str, option: str) -> object:
    """Parse the JSON value of an option.

    Raises:
        UserError: it is no JSON.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{option} is not JSON ({error}): correct it, and quote it as one argument") from None


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
