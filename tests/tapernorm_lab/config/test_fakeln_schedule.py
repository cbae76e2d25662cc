"""FakeLN's staged removals: which sites are gone at which step."""

import pytest

from tapernorm.util.errors import UserError
from tapernorm_lab.config.fakeln_schedule import FakeSchedule, removal_steps, removed_at

THREE_BLOCKS = FakeSchedule(mlp_start=2, mlp_gap=1, qk_start=5, qk_gap=2, v_start=9, v_gap=3, final=17)
WRITTEN = (  # step, what it adds
    (2, "transformer.h.0.ln_2"),
    (3, "transformer.h.1.ln_2"),
    (4, "transformer.h.2.ln_2"),
    (5, "transformer.h.0.ln_1.qk"),
    (7, "transformer.h.1.ln_1.qk"),
    (9, "transformer.h.2.ln_1.qk"),
    (9, "transformer.h.0.ln_1.v"),
    (12, "transformer.h.1.ln_1.v"),
    (15, "transformer.h.2.ln_1.v"),
    (17, "transformer.ln_f"),
)


def test_the_removed_sites_of_three_blocks_are_the_written_ones_at_every_step():
    for step in range(21):
        assert removed_at(step, THREE_BLOCKS, 3) == tuple(site for at, site in WRITTEN if at <= step)


@pytest.mark.parametrize(
    ("n_layer", "steps", "mlp", "qk", "v"),
    [
        (12, (20, 2, 44, 2, 68, 3, 104), range(20, 43, 2), range(44, 67, 2), range(68, 102, 3)),
        (24, (20, 2, 68, 2, 116, 3, 188), range(20, 67, 2), range(68, 115, 2), range(116, 186, 3)),
        (36, (30, 4, 174, 4, 318, 6, 534), range(30, 171, 4), range(174, 315, 4), range(318, 529, 6)),
        (48, (50, 4, 242, 4, 434, 6, 722), range(50, 239, 4), range(242, 431, 4), range(434, 717, 6)),
    ],
)
def test_the_published_schedules_fit_their_sizes(n_layer, steps, mlp, qk, v):
    schedule = FakeSchedule(**dict(zip(FakeSchedule.model_fields, steps, strict=True)))
    expected = {f"transformer.h.{i}.ln_2": at for i, at in enumerate(mlp)}
    expected |= {f"transformer.h.{i}.ln_1.qk": at for i, at in enumerate(qk)}
    expected |= {f"transformer.h.{i}.ln_1.v": at for i, at in enumerate(v)}
    expected |= {"transformer.ln_f": schedule.final}
    assert len(expected) == 3 * n_layer + 1
    assert list(removal_steps(schedule, n_layer).items()) == list(expected.items())


@pytest.mark.parametrize("change", [{"mlp_start": 0}, {"final": -3}, {"v_gap": -1}])
def test_an_impossible_schedule_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        FakeSchedule(**{**vars(THREE_BLOCKS), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_start": 3}, r"0\.ln_1\.qk .*step 3, .*transformer\.h\.2\.ln_2 at step 4"),
        ({"v_start": 8}, r"0\.ln_1\.v .*step 8, .*transformer\.h\.2\.ln_1\.qk at step 9"),
        ({"final": 14}, r"ln_f .*step 14, .*transformer\.h\.2\.ln_1\.v at step 15.* 3 blocks"),
    ],
)
def test_stages_that_overlap_at_this_depth_are_refused(change, message):
    schedule = FakeSchedule(**{**vars(THREE_BLOCKS), **change})
    with pytest.raises(UserError, match=message):
        removal_steps(schedule, 3)
    removal_steps(schedule, 2)  # two blocks leave room
