"""A warning of running means that reach back over too much of the warm-up of the gate.

The pre-logit scale climbs while a model is trained from scratch. A mean over most of that climb lies far below the
scale at k_start, and so does the target that it gives the scale loss.
"""

from collections.abc import Iterable, Sequence

from .jobs import PretrainJob

_MOST = 0.1  # of the steps before the gate falls


def horizon_warning(jobs: Iterable[PretrainJob]) -> str | None:
    """Return a sentence on those of `jobs` whose horizon 1/m exceeds a tenth of k_start; None if none does."""
    found = [(1 / job.ema_rate_of(taper), job.schedule_of(taper).start) for job in jobs if (taper := job.taper)]
    if not (long := [(horizon, start) for horizon, start in found if horizon > _MOST * start]):
        return None
    horizon, start = (_range(values) for values in zip(*long, strict=True))
    some = f" in {len(long)} of {len(found)} trainings" if len(found) > 1 else ""
    return (
        f"warning: the running means behind c and s_tgt reach back over 1/m = {horizon} steps{some}, more than a tenth "
        f"of the {start} steps before the gate falls. Set taper.ema_rate to null, or train for more steps"
    )


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.4g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
