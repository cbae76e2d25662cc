"""Several processes that train one model compute what a single one computes on the whole batch."""

import dataclasses
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from finetuning import make_job, write_base, write_blocks
from places import ROOT
from ranked import BATCH, STEPS, die_at, largest, make_trainer, state_of, together, train
from torch import Tensor
from training import HARDWARE

from tapernorm import calibrate
from tapernorm.util.errors import UserError
from tapernorm_lab.config.load import parse
from tapernorm_lab.config.run import Config
from tapernorm_lab.experiments.finetune import finetune
from tapernorm_lab.training import ranks
from tapernorm_lab.training import trainer as training
from tapernorm_lab.training.trainer import Diverged

TOLERANCE = 1e-10
SPLITS = {
    "whole": {},
    "micro-batches": {"micro_batch": 3},  # of 4 rows on each of two ranks, of 8 in a single process
    "micro-batches and activation checkpointing": {"micro_batch": 2, "activation_checkpointing": True},
}


def distances(one: tuple[Any, ...], other: tuple[Any, ...]) -> dict[str, float]:
    """Of two trainings: their states, the metrics of all their steps, their validation scores."""
    (state, rows, score), (other_state, other_rows, other_score) = one, other
    found = largest(state, other_state)
    for row, other_row in zip(rows, other_rows, strict=True):
        found |= {f"{name} at step {row['step']}": d for name, d in largest(row, other_row).items()}
    return found | {"score": abs(score - other_score)}


def beyond(found: dict[str, float], tolerance: float = TOLERANCE) -> dict[str, float]:
    return {name: distance for name, distance in found.items() if distance > tolerance}


def bitwise(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value.nan_to_num(-7.0), other[name].nan_to_num(-7.0)) for name, value in one.items()
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, ...]]:
    """The same training in one process, each once."""
    made: dict[str, tuple[Any, ...]] = {}

    def result(kind: str, **options: Any) -> tuple[Any, ...]:
        key = f"{kind} {options}"
        if key not in made:
            made[key] = train(kind, tmp_path_factory.mktemp("alone"), **options)
        return made[key]

    return result


# --- the same numbers ---


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["decoder", "gpt2", "fakeln"])
def test_two_ranks_equal_one_process_on_the_whole_batch(tmp_path: Path, alone, kind: str, split: str) -> None:
    """Parameters, optimizer, c, s_tgt, sigma_bar, their running means and all metrics, through every form of the norms.

    FakeLN's auxiliary loss is apart: its sigma_hat is each micro-batch's own; the next test is about it.
    """
    options = SPLITS[split] | ({"aux_weight": 0.0} if kind == "fakeln" else {})
    one, other = together(tmp_path, train, kind, tmp_path / "run", **options)
    assert bitwise(one[0], other[0])
    assert one[1:] == other[1:]
    assert beyond(distances(one, alone(kind, **options))) == {}
    constants = "sigma_bars" if kind == "fakeln" else ".c"
    assert all(value.isfinite().all() for name, value in one[0].items() if name.endswith(constants))
    assert [one[1][step]["gate"] for step in (0, -1)] == [1, 0]


def test_fakeln_with_its_loss_is_the_same_where_the_micro_batches_are(tmp_path: Path, alone) -> None:
    """sigma_hat is the mean over a micro-batch: rows 0-1, 2-3, 4-5 and 6-7 are one each on two ranks as on one."""
    same, _ = together(tmp_path, train, "fakeln", tmp_path / "run", micro_batch=2)
    assert beyond(distances(same, alone("fakeln", micro_batch=2))) == {}
    assert beyond(distances(same, alone("fakeln", micro_batch=4)), 1e-6)


def test_three_ranks_of_which_the_last_validates_less(tmp_path: Path, alone) -> None:
    """Six batches of validation blocks, of 2 rows and of 1, dealt out to three ranks; the batch of 9 in threes."""
    found = together(tmp_path, train, "decoder", tmp_path / "run", ranks=3, batch=9)
    assert all(bitwise(found[0][0], other[0]) for other in found)
    assert beyond(distances(found[0], alone("decoder", batch=9))) == {}


def own_losses(folder: Path, dropout: float) -> list[float]:
    """This rank's own cross-entropies of three steps on batches whose rows are all the same."""
    trainer = make_trainer("gpt2", folder, dropout=dropout)
    whole, loss, seen = trainer.plan.batch_at, trainer.loss, []

    def noted(*arguments: Any) -> Any:
        seen.append(loss(*arguments)[0].item())
        return loss(*arguments)

    trainer.loss = noted
    alike = {"batch_at": lambda step: tuple(part[:1].expand_as(part) for part in whole(step))}
    trainer.plan = dataclasses.replace(trainer.plan, **alike)
    for k in range(3):
        trainer.step(k)
    return seen


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_ranks_drop_apart(tmp_path: Path, dropout: float) -> None:
    one, other = together(tmp_path, own_losses, tmp_path / "run", dropout)
    assert len(one) == 3
    assert [a != b for a, b in zip(one, other, strict=True)] == [dropout > 0] * 3


# --- what would be seen ---


def own_statistics() -> None:
    """Each rank calibrates on its own rows."""
    calibrate.sum_over_ranks = list


def leaders_statistics() -> None:
    """All ranks calibrate on rank 0's rows."""

    def rank_0s(tensors: Any) -> None:
        for tensor in tensors:
            torch.distributed.broadcast(tensor, 0)

    calibrate.sum_over_ranks = rank_0s


def own_gradients() -> None:
    training.sum_gradients = lambda parameters: None


def zeros_for_missing() -> None:
    """As a plain reduction of all gradients would have it: Adam then counts steps of gamma_t before the taper."""
    original = ranks.sum_gradients

    def summed(parameters: Any) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        original(parameters)

    training.sum_gradients = summed


def means_of_all() -> None:
    """Every rank's share counts as a whole batch."""
    training.share_of = lambda rows: rows


def sabotaged(sabotage: Callable[[], None], *arguments: Any, **options: Any) -> tuple[Any, ...]:
    sabotage()
    return train(*arguments, **options)


@pytest.mark.parametrize(
    ("sabotage", "parts"),
    [
        (own_statistics, ("ranks", "alone")),
        (leaders_statistics, ("alone",)),
        (own_gradients, ("ranks", "alone")),
        (zeros_for_missing, ("alone",)),
        (means_of_all, ("alone",)),
    ],
)
def test_what_is_not_shared_as_it_should_be_is_seen(tmp_path: Path, alone, sabotage, parts: tuple[str, ...]) -> None:
    """The controls of the tests above."""
    one, other = together(tmp_path, sabotaged, sabotage, "decoder", tmp_path / "run")
    assert bool(beyond(distances(one, other), 1e-6)) == ("ranks" in parts)
    assert beyond(distances(one, alone("decoder")), 1e-6)


def test_the_ranks_of_fakeln_share_sigma(tmp_path: Path, alone) -> None:
    one, other = together(tmp_path, sabotaged, own_statistics, "fakeln", tmp_path / "run", aux_weight=0.0)
    assert beyond(distances(one, other), 1e-6)


# --- resume, and ends that are none ---


def until_killed(step: int, *arguments: Any, **options: Any) -> str:
    """Rank 1 is killed before that step; what rank 0 is told, and how soon."""
    die_at(step, rank=1)
    try:
        train(*arguments, **options)
    except UserError as error:
        return str(error)
    raise AssertionError("it went on alone")


@pytest.mark.parametrize("kind", ["gpt2", "fakeln"])
def test_a_killed_rank_ends_the_others_at_once_and_the_run_resumes_bitwise(tmp_path: Path, kind: str) -> None:
    """With dropout, whose draws differ from rank to rank."""
    options = {"dropout": 0.1, "micro_batch": 2, "checkpoint_every": 4}
    undisturbed, _ = together(tmp_path / "one", train, kind, tmp_path / "one" / "run", **options)
    began = time.monotonic()
    told, code = together(tmp_path / "two", until_killed, 9, kind, tmp_path / "run", **options)
    assert time.monotonic() - began < 20
    assert code == -9
    assert "rank 0 of 2 lost the connection to another rank" in told
    assert "run the same command again" in told
    resumed, other = together(tmp_path / "three", train, kind, tmp_path / "run", **options)
    assert resumed[1][0]["step"] == 8
    assert "resuming after step 8" in (tmp_path / "three" / "rank0.log").read_text()
    assert "resuming" not in (tmp_path / "three" / "rank1.log").read_text()
    assert bitwise(resumed[0], other[0])
    assert bitwise(resumed[0], undisturbed[0])
    assert resumed[1] == undisturbed[1][8:]
    assert resumed[2] == undisturbed[2]


def test_a_run_of_two_ranks_goes_on_in_one_process(tmp_path: Path, alone) -> None:
    options = {"checkpoint_every": 4}
    together(tmp_path, until_killed, 9, "decoder", tmp_path / "run", **options)
    found = train("decoder", tmp_path / "run", **options)
    state, rows, score = alone("decoder")
    assert found[1][0]["step"] == 8
    assert beyond(distances(found, (state, rows[8:], score))) == {}


def with_a_bad_row(kind: str, folder: Path) -> str:
    """One logit of one row, among rank 1's, is not finite at step 6."""
    trainer = make_trainer(kind, folder)
    loss = trainer.loss

    def poisoned(model: Any, driver: Any, inputs: Tensor, targets: Tensor) -> Any:
        ce, aux, logits = loss(model, driver, inputs, targets)
        bad = math.nan if ranks.rank() == 1 and driver.row()["gate"] < 1 else 1.0
        return ce * bad, aux, logits

    trainer.loss = poisoned
    try:
        trainer.run()
    except Diverged as error:
        return str(error)
    raise AssertionError("it went on")


def test_what_is_not_finite_on_one_rank_stops_all_with_the_same_words(tmp_path: Path) -> None:
    one, other = together(tmp_path, with_a_bad_row, "decoder", tmp_path / "run")
    assert one == other
    assert "the cross-entropy is not finite at step 6" in one
    assert (tmp_path / "run" / "diverged.json").exists()


def refusal(kind: str, folder: Path, **options: Any) -> str:
    try:
        train(kind, folder, **options)
    except UserError as error:
        return str(error)
    raise AssertionError("it was taken")


def test_a_batch_that_does_not_split_evenly_is_refused_with_both_numbers(tmp_path: Path) -> None:
    said = together(tmp_path, refusal, "decoder", tmp_path / "run", batch=BATCH - 1)
    assert said[0] == said[1]
    assert "a batch of 7 rows does not split evenly over 2 devices" in said[0]


def test_another_number_of_processes_than_the_hardware_section_says_is_refused(tmp_path: Path) -> None:
    (said,) = {*together(tmp_path / "two", refusal, "decoder", tmp_path / "run", devices_per_job=3)}
    assert "devices_per_job is 3, but 2 processes train" in said
    with pytest.raises(UserError, match=r"devices_per_job is 2, but 1 process train.*nproc-per-node 2"):
        make_trainer("decoder", tmp_path / "run", devices_per_job=2)


def test_fakelns_micro_batches_are_never_divided(tmp_path: Path) -> None:
    """They define numbers of its loss, and the hardware section defines none."""
    job, base, blocks = make_job("fakeln", micro_batch=4), write_base(tmp_path / "base"), write_blocks(tmp_path / "b")
    with pytest.raises(UserError, match=r"2 devices .* 4 blocks .* micro-batches of 4"):
        finetune(job, base, blocks, tmp_path / "run", HARDWARE.model_copy(update={"devices_per_job": 2}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("pretraining", "finetuning", "batch", "refused"),
    [
        (3, 1, 8, "devices_per_job (3) does not divide train.batch (8)"),
        (3, 1, 9, "devices_per_job (3) does not divide fresh.train.batch of the size tiny (8)"),
        (1, 3, 8, "devices_per_job (3) does not divide batch of the size tiny (8)"),
        (1, 4, 8, "size tiny: 4 devices cannot share a batch of 8 blocks"),
    ],
)
def test_a_config_whose_batches_do_not_split_is_refused_as_a_whole(
    pretraining: int, finetuning: int, batch: int, refused: str
) -> None:
    path = ROOT / "config" / "test.yaml"

    def of(pretraining: int, finetuning: int, batch: int) -> Config:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        raw["hardware"]["devices_per_job"], raw["train"]["batch"] = pretraining, batch
        raw["gpt2"]["sizes"][0]["devices_per_job"] = finetuning
        return parse(Config, raw, "here.yaml")

    with pytest.raises(UserError, match=re.escape(refused)):
        of(pretraining, finetuning, batch)
    config = of(2, 2, 8)
    assert config.hardware.devices_per_job == config.finetune_hardware("tiny").devices_per_job == config.most_devices
    assert config.finetune_hardware("mini").devices_per_job == 1


# --- who writes ---


def test_rank_0_alone_writes(tmp_path: Path) -> None:
    """One set of metrics, as many lines as a single process writes, and checkpoints that differ in nothing."""
    together(tmp_path, train, "decoder", tmp_path / "run", checkpoint_every=10)
    train("decoder", tmp_path / "alone", checkpoint_every=10)
    names = [sorted(path.name.split(".")[0] for path in (tmp_path / run).iterdir()) for run in ("run", "alone")]
    assert names[0] == names[1] == ["metrics", "step-00000010", "step-00000020"]
    lines = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("run", "alone")]
    assert len(lines[0]) == len(lines[1]) == STEPS + 2
    assert (tmp_path / "rank1.log").read_text() == ""


def test_the_state_of_a_step_is_complete(tmp_path: Path) -> None:
    """The control of every comparison above: what they compare changes in each of its parts."""
    trainer = make_trainer("gpt2", tmp_path)
    trainer.step(0)
    before = state_of(trainer)
    for k in range(1, 7):
        trainer.step(k)
    after = state_of(trainer)
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    for part in ("transformer.wte.weight", "transformer.h.0.ln_1.c", "driver gate", "driver anchor.target"):
        assert part in moved
