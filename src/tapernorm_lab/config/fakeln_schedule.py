"""The staged removal order of FakeLN (Baroni et al.), as a pure function of the step (method.md section 10)."""

from itertools import pairwise

from tapernorm.util.errors import UserError

from .sections import Count, PositiveInt, Strict


class FakeSchedule(Strict):
    """Start step of each removal stage, and the number of steps between consecutive blocks within a stage.

    No stage starts at step 0: sigma_bar is an average over the steps before the removal.
    """

    mlp_start: PositiveInt  # ln_2, block 0 upward
    mlp_gap: Count
    qk_start: PositiveInt  # ln_1 as q and k see it
    qk_gap: Count
    v_start: PositiveInt  # ln_1 as v sees it
    v_gap: Count
    final: PositiveInt  # ln_f


def removal_steps(schedule: FakeSchedule, n_layer: int) -> dict[str, int]:
    """Return a mapping from site to the step at which it is removed, in the order of removal.

    Raises:
        UserError: a stage starts before the previous stage has reached the last block.
    """
    stages = (
        ("ln_2", schedule.mlp_start, schedule.mlp_gap),
        ("ln_1.qk", schedule.qk_start, schedule.qk_gap),
        ("ln_1.v", schedule.v_start, schedule.v_gap),
    )
    steps = {
        f"transformer.h.{block}.{site}": start + gap * block for site, start, gap in stages for block in range(n_layer)
    }
    steps["transformer.ln_f"] = schedule.final
    for (earlier, first), (later, second) in pairwise(steps.items()):
        if second < first:
            raise UserError(
                f"FakeLN schedule: {later} is removed at step {second}, before {earlier} at step {first}. "
                f"Start that stage later, or set smaller gaps for {n_layer} blocks"
            )
    return steps


def removed_at(step: int, schedule: FakeSchedule, n_layer: int) -> tuple[str, ...]:
    """Return the sites that no longer normalise in the forward pass of `step`, in the order of removal."""
    return tuple(site for site, at in removal_steps(schedule, n_layer).items() if at <= step)
