"""What the options of `tapernorm taper` come to."""

from tapernorm_lab.own_model.options import Request, check
from tapernorm_lab.own_model.resolve import TaperRun, resolve


def run_of(request: Request) -> TaperRun:
    """The options resolved, as the verb does it."""
    return resolve(request, check(request))
