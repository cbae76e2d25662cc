"""`tapernorm VERB`: the command line, its exit codes and its one line per error."""

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .errors import UserError
from .files import REASONS
from .stopping import Stopped, stoppable
from .verbs import data, models, oddities, outcomes, publishing, recipes, report, robustness, study, training
from .verbs.arguments import Verbs


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; 0 on success, 2 with a one-line message for what the user can mend, 128 + signal if stopped."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(words, argparse.Namespace(words=words))
    try:
        with stoppable():
            arguments.verb(arguments)
    except UserError as error:
        print(f"tapernorm: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in REASONS:
            raise
        print(f"tapernorm: {error} ({REASONS[error.errno]})", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(__package__ or ""):
            raise
        print(f"tapernorm: this needs {error.name}: pip install 'tapernorm[workflow]'", file=sys.stderr)
        return 2
    except Stopped as stop:
        print(f"tapernorm: {stop}", file=sys.stderr)
        return stop.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tapernorm",
        description="Gated removal of normalization from pre-norm Transformers (arXiv 2602.10408). "
        "Each verb is one step of the pipeline; `snakemake` runs them all.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = Verbs(parser)
    for stage in (data, training, models, recipes, outcomes, report, robustness, study, oddities, publishing):
        stage.add(verbs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
