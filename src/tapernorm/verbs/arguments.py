"""Options that several verbs share, and the job that they name."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..config import Config
from ..configfile import load_config, parse
from ..errors import UserError
from ..files import parse_json
from ..settings import HardwareConfig, Strict

Job = TypeVar("Job", bound=Strict)
Verb = Callable[[argparse.Namespace], None]


class Verbs:
    """The verbs of the command line, as they are added."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def add(self, run: Verb, summary: str, *, configured: bool = False) -> argparse.ArgumentParser:
        """A verb named as the function that it runs; a configured one takes --config or --job."""
        made = self._parsers.add_parser(run.__name__, help=summary, description=summary[0].upper() + summary[1:] + ".")
        made.set_defaults(verb=run)
        if configured:
            source = made.add_mutually_exclusive_group(required=True)
            source.add_argument("--config", metavar="FILE", help="config of a run, such as config/demo.yaml")
            source.add_argument(
                "--job", metavar="JSON", help="exactly the settings of this job, as the workflow gives them"
            )
            made.add_argument(
                "--set", metavar="KEY=VALUE", action="append", default=[], help="override one config setting"
            )
        return made


def folders(made: argparse.ArgumentParser, **options: str) -> None:
    """Required options that name a folder."""
    for name, what in options.items():
        made.add_argument(f"--{name}", metavar="DIR", type=Path, required=True, help=what)


def device(made: argparse.ArgumentParser) -> None:
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))


def slots(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--jobs-per-gpu", type=positive, default=1, metavar="N", help="that share one GPU, as hardware.jobs_per_gpu"
    )


def threads(made: argparse.ArgumentParser) -> None:
    made.add_argument("--threads", type=positive, default=1, metavar="N", help="CPU threads")


def training(made: argparse.ArgumentParser) -> None:
    """What every training verb takes besides its job."""
    made.add_argument("--hardware", metavar="JSON", help="with --job: the hardware section of a config")
    made.add_argument("--threads", type=positive, metavar="N", help="CPU threads, in place of hardware.threads")


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


def job_of(arguments: argparse.Namespace, kind: type[Job], cut: Callable[[Config], Job]) -> Job:
    """The job given as JSON, or cut from the config file."""
    if arguments.job is not None:
        if arguments.set:
            raise UserError("--set changes a --config file; it does nothing to a --job")
        return parse(kind, from_json(arguments.job, "--job"), "--job")
    return cut(load_config(arguments.config, arguments.set))


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
        name, equals, folder = given.partition("=")
        if not equals or not name or not folder:
            raise UserError(f"{option} {given!r}: write it as NAME=DIR")
        if name in found:
            raise UserError(f"{option}: {name!r} is given twice")
        found[name] = Path(folder)
    return found


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def from_json(text: str, option: str) -> object:
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{option} is not JSON ({error}): quote it as one argument") from None
