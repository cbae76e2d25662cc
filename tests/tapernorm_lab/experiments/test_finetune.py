"""A whole fine-tune by each method: the same however it is split or killed, and the loss that the method states."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import finetuning
import pytest
import reference
import torch
from crashing import at_step, kill, nothing, run_apart
from finetuning import BATCH, CONTEXT, EOT, FAKELN, MICRO, STEPS, command, make_job, write_base, write_blocks
from torch import Tensor
from training import HARDWARE, leftovers, outcome_of

from tapernorm.checkpoints.store import load
from tapernorm.util.errors import UserError
from tapernorm_lab.cli.main import main
from tapernorm_lab.config.gpt2 import METHODS
from tapernorm_lab.config.jobs import FinetuneJob
from tapernorm_lab.data.blocks import Blocks, batch_of
from tapernorm_lab.experiments.finetune import attach_method, finetune
from tapernorm_lab.models.gpt2 import GPT2LMHeadModel
from tapernorm_lab.training.plan import Optimisation, Plan
from tapernorm_lab.training.trainer import Trainer
from tapernorm_lab.training.training_loss import IGNORED, next_tokens
from tapernorm_lab.training.validation_loss import Evaluation

CHANGES = sorted({FAKELN["mlp_start"], FAKELN["qk_start"], FAKELN["v_start"], FAKELN["final"]})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def steady_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without dropout, whose masks would depend on the micro-batch."""
    return write_base(tmp_path_factory.mktemp("steady"), dropout=0.0)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_blocks(tmp_path_factory.mktemp("data") / "blocks")


@pytest.fixture(scope="module")
def uninterrupted(base: Path, blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[FinetuneJob], Any]:
    """What a job ends with when nothing happens to it."""
    known: dict[str, dict[str, Any]] = {}

    def outcome(job: FinetuneJob) -> dict[str, Any]:
        key = job.model_dump_json()
        if key not in known:
            run = tmp_path_factory.mktemp("uninterrupted")
            finetune(job, base, blocks, run, MICRO)
            known[key] = outcome_of(run)
        return known[key]

    return outcome


# --- the loss ---


def test_end_of_text_is_a_target_like_others() -> None:
    a, b, c, d = 3, 4, 5, 6
    inputs, targets = next_tokens(torch.tensor([[a, b, EOT, c, d, EOT]]))
    assert inputs.tolist() == [[a, b, EOT, c, d, EOT]]
    assert targets.tolist() == [[b, EOT, c, d, EOT, IGNORED]]
    assert (targets != IGNORED).sum() == 5


def test_the_first_step_has_the_loss_that_numpy_computes(steady_base: Path, blocks: Path, tmp_path: Path) -> None:
    job = make_job("vanilla")
    trainer = make_trainer(job, steady_base, blocks, tmp_path, dtype=torch.float64)
    rows = batch_of(Blocks.open(blocks, "train"), seed=job.seed, step=0, batch=BATCH)
    with torch.no_grad():
        logits = trainer.model(input_ids=rows, use_cache=False).logits[:, :-1]
    expected = reference.cross_entropies(logits.reshape(-1, logits.shape[-1]).numpy(), rows[:, 1:].reshape(-1).numpy())
    assert len(expected) == BATCH * (CONTEXT - 1)
    assert trainer.step(0)["ce"] == pytest.approx(expected.mean(), abs=1e-12)


# --- accumulation, activation checkpointing ---


def make_trainer(
    job: FinetuneJob,
    base: Path,
    blocks: Path,
    folder: Path,
    *,
    dtype: torch.dtype,
    micro_batch: int | None = None,
    checkpointed: bool = False,
) -> Trainer:
    """The trainer of `job` in the dtype of one's choice; gains and biases are random, not 1 and 0."""
    model: Any = load(base).to(dtype).train()
    draw = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ln_" in name:
                parameter.uniform_(0.5, 1.5, generator=draw)
    train = Blocks.open(blocks, "train")
    plan = Plan(
        label="tiny",
        seed=job.seed,
        steps=job.steps,
        optimisation=Optimisation.of_finetuning(job),
        hardware=HARDWARE.model_copy(update={"micro_batch": micro_batch, "activation_checkpointing": checkpointed}),
        batch_at=lambda step: next_tokens(batch_of(train, seed=job.seed, step=step, batch=job.batch)),
        validate=lambda: Evaluation(nats=1.0, tokens=1, bytes=None),
        tokens_per_step=job.batch * job.context,
        fingerprint="f" * 16,
        folder=folder,
    )
    return Trainer(model, attach_method(model, job, eot=EOT), plan)


def state_after(trainer: Trainer, steps: int) -> dict[str, Tensor]:
    """Losses of every step, and everything that they changed."""
    rows = [trainer.step(k) for k in range(steps)]
    state = {f"{key} {row['step']}": torch.tensor(row[key]).double() for row in rows for key in ("ce", "aux")}
    state |= {name: value.clone() for name, value in trainer.model.state_dict().items()}
    if trainer.driver is not None:
        state |= {f"driver {k}": torch.as_tensor(v) for k, v in trainer.driver.state_dict().items()}
    return state


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[k].double().nan_to_num() - other[k].double().nan_to_num()).abs().max().item() for k in one)


@pytest.mark.parametrize("method", METHODS)
def test_accumulation_gives_what_one_large_batch_gives(
    steady_base: Path, blocks: Path, tmp_path: Path, method: str
) -> None:
    """FakeLN's auxiliary loss apart, whose target is each micro-batch's own mean."""
    job = make_job(method, **({"aux_weight": 0.0} if method == "fakeln" else {}))
    whole = state_after(make_trainer(job, steady_base, blocks, tmp_path, dtype=torch.float64), STEPS)
    for micro_batch in (1, 2, 3):
        split = make_trainer(job, steady_base, blocks, tmp_path, dtype=torch.float64, micro_batch=micro_batch)
        assert largest_difference(whole, state_after(split, STEPS)) < 1e-11


def test_fakelns_own_loss_depends_on_the_micro_batch(steady_base: Path, blocks: Path, tmp_path: Path) -> None:
    """The control of the test above, and why the micro-batch is part of that method's job."""
    settings = {"dtype": torch.float64}
    whole = make_trainer(make_job("fakeln"), steady_base, blocks, tmp_path, **settings)
    split = make_trainer(make_job("fakeln"), steady_base, blocks, tmp_path, micro_batch=1, **settings)
    assert whole.step(0)["aux"] != pytest.approx(split.step(0)["aux"], rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_activation_checkpointing_changes_no_number(base: Path, blocks: Path, tmp_path: Path, method: str) -> None:
    """With dropout, whose masks are drawn again; statistics are not counted twice."""
    settings = {"dtype": torch.float64, "micro_batch": 2}
    plain = state_after(make_trainer(make_job(method), base, blocks, tmp_path, **settings), STEPS)
    again = make_trainer(make_job(method), base, blocks, tmp_path, checkpointed=True, **settings)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    again.model.get_submodule("transformer.h.0.ln_1").register_forward_hook(count)
    assert largest_difference(plain, state_after(again, STEPS)) < 1e-11
    assert calls == 2 * 2 * STEPS  # two micro-batches a step, each forward and again in the backward pass


# --- the whole job ---


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bits(
    base: Path, blocks: Path, tmp_path: Path, uninterrupted, method: str
) -> None:
    finetune(make_job(method), base, blocks, tmp_path / "again", MICRO)
    finetune(make_job(method, seed=4), base, blocks, tmp_path / "other", MICRO)
    one = uninterrupted(make_job(method))
    assert outcome_of(tmp_path / "again") == one
    assert outcome_of(tmp_path / "other")["weights"] != one["weights"]
    assert leftovers(tmp_path / "again") == []


def test_dropout_is_drawn_anew_at_each_step(base: Path, blocks: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_job("vanilla"), base, blocks, tmp_path, dtype=torch.float64)
    state = copy.deepcopy(trainer.model.state_dict())
    same = trainer.plan.batch_at(0)
    trainer.plan = replace(trainer.plan, batch_at=lambda step: same)
    losses = []
    for k in (1, 2, 1):
        trainer.model.load_state_dict(state)
        losses.append(trainer.step(k)["ce"])
    assert losses[0] != losses[1]
    assert losses[0] == losses[2]


@pytest.mark.parametrize(
    ("method", "step", "moment"),
    [("fakeln", CHANGES[0], "after"), ("fakeln", CHANGES[-1], "before"), ("all_aux", CHANGES[0], "before")],
)
def test_a_run_killed_where_the_norms_change_ends_the_same(
    base: Path, blocks: Path, tmp_path: Path, uninterrupted, method: str, step: int, moment: str
) -> None:
    job, run = make_job(method), tmp_path / "run"
    hardware = MICRO.model_copy(update={"checkpoint_every": 1 if moment == "after" else 3})
    kill(partial(at_step, step, moment), command(job, base, blocks, run, hardware), tmp_path / "log")
    assert main(command(job, base, blocks, run)) == 0
    assert outcome_of(run) == uninterrupted(job)
    assert leftovers(run) == []


def test_every_norm_of_fakeln_is_gone_in_the_end(base: Path, blocks: Path, tmp_path: Path) -> None:
    result = finetune(make_job("fakeln"), base, blocks, tmp_path, MICRO)
    assert result["removals"] == {
        "transformer.h.0.ln_2": 3,
        "transformer.h.1.ln_2": 4,
        "transformer.h.0.ln_1.qk": 5,
        "transformer.h.1.ln_1.qk": 6,
        "transformer.h.0.ln_1.v": 7,
        "transformer.h.1.ln_1.v": 8,
        "transformer.ln_f": 10,
    }
    assert all(entry["sigma_bar"] > 0 for entry in result["norms"].values())
    model = load(tmp_path)
    assert isinstance(model, GPT2LMHeadModel)
    ids = Blocks.open(blocks, "valid").rows.long()
    with torch.no_grad():
        once, twice = (model.transformer.ln_f(scale * torch.ones(3, 12).cumsum(-1)) for scale in (1.0, 2.0))
        beta = model.transformer.ln_f.bias
        torch.testing.assert_close(twice - beta, 2 * (once - beta))  # linear in its input
        assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize(("method", "norms"), [("internal_aux", 4), ("all_aux", 5), ("vanilla", 0)])
def test_the_result_says_what_was_tapered(base: Path, blocks: Path, tmp_path: Path, method: str, norms: int) -> None:
    result = finetune(make_job(method), base, blocks, tmp_path, MICRO)
    assert result["kind"] == "finetune"
    assert FinetuneJob.model_validate(result["job"]) == make_job(method)
    assert len(result["norms"]) == norms
    assert (result["scale_target"] is not None) == (norms > 0)
    assert result["removals"] is None
    assert result["values"]["valid_tokens"]["value"] == 7 * (CONTEXT - 1)
    assert "bits_per_byte" not in result["values"]


def test_the_learning_rate_falls_to_its_floor_after_the_last_step(base: Path, blocks: Path, tmp_path: Path) -> None:
    finetune(make_job("vanilla"), base, blocks, tmp_path, MICRO)
    rates = [row["lr"] for row in outcome_of(tmp_path)["metrics"]]
    assert rates[:2] == [5e-3, 1e-2]
    assert rates[2] == 1e-2
    halfway = 2 + (20 - 2) // 2
    assert rates[halfway] == pytest.approx((1e-2 + 2e-3) / 2)
    assert min(rates) > 2e-3  # the cosine is cut off before it ends


# --- what is refused ---


def test_blocks_of_another_length_are_refused(base: Path, tmp_path: Path) -> None:
    short = write_blocks(tmp_path / "short", context=8)
    with pytest.raises(UserError, match="blocks of 8 tokens and the job asks for 9"):
        finetune(make_job(), base, short, tmp_path / "run", MICRO)


def test_a_base_that_takes_fewer_tokens_is_refused(base: Path, tmp_path: Path) -> None:
    long = write_blocks(tmp_path / "long", context=CONTEXT + 1)
    with pytest.raises(UserError, match="takes 9 tokens and the blocks have 10"):
        finetune(make_job(context=CONTEXT + 1), base, long, tmp_path / "run", MICRO)


def test_a_removal_after_the_last_step_is_refused(base: Path, blocks: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="last norm at step 10 and the run has 9"):
        finetune(make_job("fakeln", steps=9), base, blocks, tmp_path / "run", MICRO)


def test_another_base_model_never_resumes(base: Path, steady_base: Path, blocks: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    other = write_base(tmp_path / "other", dropout=0.2)  # of the same weights
    assert (other / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    kill(partial(at_step, 9, "before"), command(make_job(), base, blocks, run), tmp_path / "log")
    assert run_apart(nothing, command(make_job(), other, blocks, run), tmp_path / "log") == 2
    assert re.search(r"data\.base\.config\.json .* there, .* here", (tmp_path / "log").read_text())


def test_fakelns_micro_batch_is_the_jobs_not_the_machines(base: Path, blocks: Path, tmp_path: Path) -> None:
    finetune(make_job("fakeln"), base, blocks, tmp_path / "one", MICRO)
    finetune(make_job("fakeln"), base, blocks, tmp_path / "two", HARDWARE)
    assert outcome_of(tmp_path / "one") == outcome_of(tmp_path / "two")


def test_a_job_holds_what_its_method_reads_and_nothing_else() -> None:
    raw = make_job("vanilla").model_dump()
    with pytest.raises(ValueError, match="'vanilla' and taper="):
        FinetuneJob.model_validate({**raw, "taper": finetuning.TAPER})
    with pytest.raises(ValueError, match="'vanilla' and micro_batch=2"):
        FinetuneJob.model_validate({**raw, "micro_batch": 2})
