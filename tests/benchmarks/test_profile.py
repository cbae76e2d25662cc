"""The profile of a training step blames the part that is made large."""

from pathlib import Path

import pytest
import torch
import training

from benchmarks.profile import PARTS, parts_of, plan_of
from tapernorm.models.decoder import Decoder
from tapernorm.util.rng import generator
from tapernorm_lab.experiments.pretrain import attach_variant
from tapernorm_lab.training.plan import Optimisation
from tapernorm_lab.training.trainer import Trainer


def shares(folder: Path, **changes: int) -> dict[str, float]:
    job = training.make_job("internal_aux", steps=20, **changes)
    model = Decoder(job.model).initialize(generator(0, "init"))
    rows = torch.randint(training.VOCABULARY, (4, job.model.context + 1), generator=generator(0, "rows"))
    optimisation = Optimisation.of_pretraining(job.train, job.steps)
    plan = plan_of(optimisation, job.steps, rows[:, :-1], rows[:, 1:], training.HARDWARE, folder)
    taper = attach_variant(model, job)
    return parts_of(Trainer(model, taper, plan), 5, 2)["shares"]


@pytest.mark.parametrize(
    ("change", "part"), [({"vocab_size": 400_000}, "head and cross-entropy"), ({"d_ff": 30_000}, "linear maps")]
)
def test_the_part_that_is_made_large_takes_most_of_the_step(tmp_path: Path, change: dict[str, int], part: str) -> None:
    grown, usual = shares(tmp_path, **change), shares(tmp_path)
    assert grown.keys() == usual.keys() == set(PARTS)
    assert sum(grown.values()) == pytest.approx(1)
    assert all(share > 0 for share in usual.values())
    assert grown[part] > 2 * usual[part]
