"""When FakeLN removes what: the staged order of Baroni et al. as a pure function of the step (method.md section 10)."""

from itertools import pairwise

from tapernorm.util.errors import UserError

from .sections import Count, PositiveInt, Strict


class FakeSchedule(Strict):
    """Start step of each stage, and steps from one block to the next within it; sigma_bar needs a step before it."""

    mlp_start: PositiveInt  # ln_2, block 0 upward
    mlp_gap: Count
    qk_start: PositiveInt  # ln_1 as q and k see it
    qk_gap: Count
    v_start: PositiveInt  # ln_1 as v sees it
    v_gap: Count
    final: PositiveInt  # ln_f


def removal_steps(schedule: FakeSchedule, n_layer: int) -> dict[str, int]:
    """Site -> the step at which it is removed, in the order of removal.

    Raises:
        UserError: a stage would begin before the one ahead of it is through all blocks.
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
                f"FakeLN schedule: {later} at step {second} comes before {earlier} at step {first}, and the stages "
                f"follow one another; start it later or take smaller gaps for {n_layer} blocks"
            )
    return steps


def removed_at(step: int, schedule: FakeSchedule, n_layer: int) -> tuple[str, ...]:
    """The sites that no longer normalise in the forward pass of `step`, in the order of removal."""
    return tuple(site for site, at in removal_steps(schedule, n_layer).items() if at <= step)
