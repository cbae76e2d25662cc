"""The optimizer step: what it computes, what it writes down, and when it refuses to be taken."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranked import largest, state_of
from torch import Tensor, nn
from training import HARDWARE, START, STEPS, make_job

from tapernorm.models.decoder import Decoder
from tapernorm.schedule import GateSchedule, gate_at, lr_at
from tapernorm.util.atomic_files import read_json
from tapernorm.util.rng import generator
from tapernorm_lab.config.jobs import PretrainJob
from tapernorm_lab.experiments.pretrain import attach_variant
from tapernorm_lab.training.plan import Optimisation, Plan
from tapernorm_lab.training.trainer import Diverged, Trainer
from tapernorm_lab.training.validation_loss import Evaluation

GROUPS = ("embeddings", "attention", "mlp", "norms")
PARTS = {"norm": "norms", "self_attn.": "attention", ".mlp.": "mlp"}


def batches(job: PretrainJob) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        size = (job.train.batch, job.model.context + 1)
        both = torch.randint(job.model.vocab_size, size, generator=generator(0, f"batch {step}"))
        return both[:, :-1], both[:, 1:]

    return batch_at


def make_trainer(
    job: PretrainJob, folder: Path, *, dtype: torch.dtype = torch.float64, micro_batch: int | None = None, **plan: Any
) -> Trainer:
    """A trainer of `job` on made-up batches; gains are random, not 1."""
    model = Decoder(job.model).initialize(generator(job.seed, "init")).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator(1, name))
    settings: dict[str, Any] = {
        "label": "tiny",
        "steps": job.steps,
        "seed": job.seed,
        "optimisation": Optimisation.of_pretraining(job.train, job.steps),
        "hardware": HARDWARE.model_copy(update={"micro_batch": micro_batch}),
        "batch_at": batches(job),
        "validate": lambda: Evaluation(nats=1.0, tokens=1, bytes=1),
        "tokens_per_step": job.train.batch * job.model.context,
        "fingerprint": "f" * 16,
        "folder": folder,
    }
    return Trainer(model, attach_variant(model, job), Plan(**{**settings, **plan}))


def keep_gradients(trainer: Trainer) -> dict[str, Tensor | None]:
    """The gradients that each optimizer update sees, after clipping; refilled by every step."""
    seen: dict[str, Tensor | None] = {}

    def keep(*_: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            seen[name] = None if parameter.grad is None else parameter.grad.clone()

    trainer.optimizer.register_step_pre_hook(keep)
    return seen


# --- gradient accumulation ---


def of_one_step(trainer: Trainer, k: int) -> dict[str, Any]:
    """Metrics, gradients and running means of step k."""
    gradients = keep_gradients(trainer)
    row = trainer.step(k)
    means = {} if trainer.driver is None else trainer.driver.state_dict()
    return {**row, **{f"gradient {n}": g for n, g in gradients.items()}, **means}


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("batch", [4, 5])
@pytest.mark.parametrize("k", [0, START - 1, START, START + 4, STEPS - 1])
def test_accumulation_changes_nothing(tmp_path: Path, norm: str, batch: int, k: int) -> None:
    """Micro-batches of 1, 2, 4 of the same windows, the last one smaller where they do not divide the batch."""
    job = make_job(norm=norm, batch=batch)
    trainer = make_trainer(job, tmp_path)
    for earlier in range(k):
        trainer.step(earlier)
    # copied as one, for they share the gate
    states = [trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.driver.state_dict()]
    states = copy.deepcopy(states)
    whole = of_one_step(trainer, k)
    assert (whole["aux"] > 0) == (k >= START)
    for micro_batch in (1, 2, 4):
        split = make_trainer(job, tmp_path, micro_batch=micro_batch)
        for part, state in zip((split.model, split.optimizer, split.driver), states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        found = largest(whole, of_one_step(split, k))
        assert max(found.values()) < 1e-12, {n: d for n, d in found.items() if d >= 1e-12}


def test_a_mean_of_means_would_be_seen(tmp_path: Path) -> None:
    """The control of the test above: unequal micro-batches weigh by their rows."""
    trainer = make_trainer(make_job(batch=5), tmp_path)
    parts = zip(*(each.split(2) for each in trainer.plan.batch_at(0)), strict=True)
    with torch.no_grad():
        means = [trainer.loss(trainer.model, None, *rows)[0].item() for rows in parts]
    weighted = np.average(means, weights=[2, 2, 1])
    row = trainer.step(0)
    assert row["ce"] == pytest.approx(weighted, abs=1e-12)
    assert abs(row["ce"] - np.mean(means)) > 1e-4


def test_statistics_are_fed_once_per_step_whatever_the_micro_batch(tmp_path: Path) -> None:
    trainer = make_trainer(make_job(), tmp_path, micro_batch=1)
    for k in range(START + 2):
        trainer.step(k)
    updates = {n: v.item() for n, v in trainer.driver.state_dict().items() if n.endswith("updates")}
    assert len(updates) == 6
    assert set(updates.values()) == {START}


# --- against a direct computation ---


def forward_by_hand(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, input of the final norm) of the model as it stands."""
    seen = []
    handle = model.get_submodule("model.norm").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        logits = model(inputs)
    handle.remove()
    return logits, seen[0]


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("variant", ["baseline", "all_aux"])
def test_a_row_says_what_the_step_did(tmp_path: Path, norm: str, variant: str) -> None:
    job = make_job(variant, norm=norm, clip_norm=1e9)
    trainer = make_trainer(job, tmp_path, micro_batch=3)
    gradients = keep_gradients(trainer)
    schedule = GateSchedule(START, STEPS)
    scale_means = []
    for k in range(STEPS):
        if trainer.driver is not None:
            trainer.driver.set_step(k)
        inputs, targets = trainer.plan.batch_at(k)
        logits, h = forward_by_hand(trainer.model, inputs)
        if norm == "layernorm":
            h = h - h.mean(-1, keepdim=True)
        scale = (h.square().mean(-1) + job.model.norm_eps).sqrt()
        scale_means.append(scale.mean().item())
        row = trainer.step(k)

        gate = 1.0 if variant == "baseline" else float(np.float32(gate_at(k, schedule)))
        assert row["gate"] == gate
        assert row["lr"] == lr_at(k, steps=STEPS, peak=job.train.lr, warmup=3)
        assert {group["lr"] for group in trainer.optimizer.param_groups} == {row["lr"]}
        assert row["step"] == k
        assert row["ce"] == pytest.approx(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
        assert row["logit_rms"] == pytest.approx(logits.square().mean().sqrt().item(), rel=1e-12)
        assert row["logit_max"] == pytest.approx(logits.abs().max().item(), rel=1e-12)
        assert row["scale_mean"] == pytest.approx(scale.mean().item(), rel=1e-12)
        assert row["scale_max"] == pytest.approx(scale.max().item(), rel=1e-12)
        if variant == "baseline" or k < START:
            assert (row["scale_target"], row["aux"]) == (None, 0.0)
        else:
            m = 0.1
            ema = sum(m * (1 - m) ** (START - 1 - i) * scale_means[i] for i in range(START)) / (1 - (1 - m) ** START)
            assert row["scale_target"] == pytest.approx(ema, rel=1e-12)
            assert row["aux"] == pytest.approx(0.1 * (scale - ema).square().mean().item(), rel=1e-9)
        assert row["loss"] == row["ce"] + row["aux"]

        squares = dict.fromkeys(GROUPS, 0.0)
        for name, gradient in gradients.items():
            group = next((g for part, g in PARTS.items() if part in name), "embeddings")
            squares[group] += 0.0 if gradient is None else gradient.square().sum().item()
        for group, square in squares.items():
            assert row[f"grad_norm_{group}"] == pytest.approx(math.sqrt(square), rel=1e-12)
        assert row["grad_norm"] == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-12)
    assert trainer.driver is None or row["gate"] < 0.1


def test_the_gradient_norm_is_the_one_before_clipping(tmp_path: Path) -> None:
    free, clipped = (make_trainer(make_job(clip_norm=clip), tmp_path) for clip in (1e9, 0.01))
    gradients = keep_gradients(clipped)
    assert free.step(0) == clipped.step(0)
    total = math.sqrt(sum(g.square().sum().item() for g in gradients.values() if g is not None))
    assert total == pytest.approx(0.01, rel=1e-4)


def test_a_step_equals_plain_adamw_by_hand(tmp_path: Path) -> None:
    """Against torch's unfused AdamW in float64, fed with gradients of its own."""
    job = make_job("baseline")
    trainer = make_trainer(job, tmp_path)
    model = copy.deepcopy(trainer.model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": job.train.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    for k in range(STEPS):
        trainer.step(k)
        inputs, targets = trainer.plan.batch_at(k)
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.train.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(k, steps=STEPS, peak=job.train.lr, warmup=3)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trainer.model.get_parameter(name), parameter, rtol=1e-9, atol=1e-9)


def test_gamma_t_starts_its_optimizer_state_at_the_taper(tmp_path: Path) -> None:
    trainer = make_trainer(make_job(), tmp_path)
    gains = [p for n, p in trainer.model.named_parameters() if n.endswith("gamma_t")]
    assert len(gains) == 5
    for k in range(START):
        trainer.step(k)
    assert not any(p in trainer.optimizer.state for p in gains)
    trainer.step(START)
    assert {trainer.optimizer.state[p]["step"].item() for p in gains} == {1.0}


# --- divergence ---


def poison_head(trainer: Trainer, factor: float) -> None:
    with torch.no_grad():
        trainer.model.get_parameter("lm_head.weight").mul_(factor)


CASES = {
    "an infinite weight": (lambda t: poison_head(t, math.inf), "the cross-entropy"),
    "a gradient that overflows": (lambda t: poison_head(t, 3e37), "the gradient of model."),
    "finite gradients, infinite norm": (lambda t: poison_head(t, 1e21), "the gradient norm"),
    "an anchor that overflows": (lambda t: t.driver.scale_target.fill_(-1e30), "the auxiliary loss"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_a_number_that_is_not_finite_stops_before_the_update(
    tmp_path: Path, case: str, micro_batch: int | None
) -> None:
    poison, tensor = CASES[case]
    job = make_job(tie_head=False)
    trainer = make_trainer(job, tmp_path, dtype=torch.float32, micro_batch=micro_batch)
    for k in range(START + 1):
        trainer.step(k)
    poison(trainer)
    trainer.driver.set_step(START + 1)
    before = state_of(trainer)
    with pytest.raises(Diverged, match=f"^tiny: {tensor}.* is not finite at step {START + 1};"):
        trainer.step(START + 1)
    after = state_of(trainer)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value.nan_to_num(), after[name].nan_to_num()), name
    marker = read_json(tmp_path / "diverged.json")
    assert (marker["step"], marker["fingerprint"]) == (START + 1, "f" * 16)
    assert marker["tensor"].startswith(tensor)


def test_the_gradient_named_is_the_one_that_is_not_finite(tmp_path: Path) -> None:
    trainer = make_trainer(make_job("baseline"), tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    trainer.model.get_parameter(name).register_hook(lambda gradient: gradient / 0)
    before = state_of(trainer)
    with pytest.raises(Diverged, match=f"the gradient of {name} is not finite at step 0"):
        trainer.step(0)
    assert all(torch.equal(value, before[key]) for key, value in state_of(trainer).items())


def test_a_finite_step_is_taken(tmp_path: Path) -> None:
    """The control: without poison the same comparison sees the update."""
    trainer = make_trainer(make_job(tie_head=False), tmp_path)
    before = state_of(trainer)
    trainer.step(0)
    after = state_of(trainer)
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert not (tmp_path / "diverged.json").exists()


def test_a_known_divergence_is_told_again_without_a_step(tmp_path: Path) -> None:
    def never(step: int) -> Tensor:
        raise AssertionError("a batch was drawn")

    job = make_job("baseline")
    first = make_trainer(job, tmp_path)
    first.model.get_parameter("model.norm.weight").register_hook(lambda gradient: gradient / 0)
    with pytest.raises(Diverged) as original:
        first.run()
    with pytest.raises(Diverged) as repeated:
        make_trainer(job, tmp_path, batch_at=never).run()
    assert str(repeated.value) == str(original.value)
    make_trainer(job, tmp_path, fingerprint="another").run()


def test_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    def batch_at(step: int) -> tuple[Tensor, Tensor]:
        if step == 9:
            poison_head(trainer, math.nan)
        return batches(job)(step)

    job = make_job(tie_head=False)
    trainer = make_trainer(job, tmp_path, batch_at=batch_at)
    with pytest.raises(Diverged, match="at step 9"):
        trainer.run()
    step, state = trainer.checkpoints.load(trainer.checkpoints.latest())
    assert step == 8
    assert all(value.isfinite().all() for value in state["model"].values())


def failing_once(job: PretrainJob, step: int) -> tuple[dict[str, Any], Callable[[int], tuple[Tensor, Tensor]]]:
    """Settings under which step `step` has an infinite gradient, the first time it is taken."""
    taken: dict[str, Any] = {"trainer": None, "failed": False}

    def batch_at(k: int) -> tuple[Tensor, Tensor]:
        if k == step and not taken["failed"]:
            taken["failed"] = True
            name = "model.layers.0.mlp.up_proj.weight"
            taken["trainer"].model.get_parameter(name).register_hook(lambda gradient: gradient / 0)
        return batches(job)(k)

    return taken, batch_at


@pytest.mark.parametrize("step", [1, START, START + 2, 9])
def test_a_run_goes_on_bitwise_from_the_state_before_the_step_that_diverged(tmp_path: Path, step: int) -> None:
    """Before the taper too: what the norms observed in that step is dropped."""
    job = make_job()
    taken, batch_at = failing_once(job, step)
    taken["trainer"] = make_trainer(job, tmp_path / "once", batch_at=batch_at)
    with pytest.raises(Diverged, match=f"at step {step};.* The last good state stays in "):
        taken["trainer"].run()
    kept, _ = taken["trainer"].checkpoints.load(taken["trainer"].checkpoints.latest())
    assert kept == step
    (tmp_path / "once/diverged.json").unlink()
    again, whole = make_trainer(job, tmp_path / "once"), make_trainer(job, tmp_path / "whole")
    again.run()
    whole.run()
    before, after = state_of(whole), state_of(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(value.nan_to_num(), after[name].nan_to_num()) for name, value in before.items())


def test_observing_the_step_that_diverged_would_be_seen(tmp_path: Path) -> None:
    """The control of the test above: one update more of the running means is another state."""
    one, other = make_trainer(make_job(), tmp_path / "one"), make_trainer(make_job(), tmp_path / "other")
    one.step(0)
    other.step(0)
    with other.driver.observe():
        other._accumulate(*other.plan.batch_at(1), None)
    name = "driver model.layers.0.input_layernorm.statistics.ema"
    assert not torch.equal(state_of(one)[name], state_of(other)[name])


def test_the_message_says_where_the_pass_broke_and_what_to_change(tmp_path: Path) -> None:
    trainer = make_trainer(make_job(tie_head=False), tmp_path, dtype=torch.float32, remedy="take a lower --lr")
    for k in range(START + 1):
        trainer.step(k)
    with torch.no_grad():
        trainer.model.get_parameter("model.layers.1.mlp.down_proj.weight").fill_(math.inf)
    gate = gate_at(START + 1, GateSchedule(START, STEPS))
    where = rf"first value that is not finite came out of model\.layers\.1\.mlp\.down_proj \(gate {gate:.3g}\)\. "
    with pytest.raises(Diverged, match=f"{where}.* refused: take a lower --lr, or delete "):
        trainer.step(START + 1)


def test_what_was_salvaged_is_told_now_and_again(tmp_path: Path) -> None:
    job = make_job()
    taken, batch_at = failing_once(job, 5)
    seen = []

    def salvage(steps: int) -> str:
        assert steps == 5
        seen.append(state_of(trainer)["model.norm.weight"])
        return "It was sold."

    trainer = taken["trainer"] = make_trainer(job, tmp_path, batch_at=batch_at, salvage=salvage)
    for _ in range(2):
        with pytest.raises(Diverged, match=r"at step 5;.*diverged\.json.* It was sold\.$"):
            trainer.run()
    _, state = trainer.checkpoints.load(trainer.checkpoints.latest())
    assert [torch.equal(gain, state["model"]["model.norm.weight"]) for gain in seen] == [True]


def test_a_final_score_that_is_not_finite_is_a_result_where_the_plan_says_so(tmp_path: Path) -> None:
    lost = {"validate": lambda: Evaluation(nats=math.inf, tokens=1, bytes=1)}
    assert make_trainer(make_job(), tmp_path / "one", **lost, tolerant=True).run().ce == math.inf
    with pytest.raises(Diverged, match=r"at step 11; .*last step, and nothing is published"):
        make_trainer(make_job(), tmp_path / "two", **lost).run()


@pytest.mark.parametrize(("factor", "told"), [(1.0, 0), (300.0, 1)])
def test_a_loss_far_above_that_of_guessing_is_told_once_and_training_goes_on(
    tmp_path: Path, capsys, factor: float, told: int
) -> None:
    trainer = make_trainer(make_job("baseline", tie_head=False), tmp_path, remedy="wait")
    poison_head(trainer, factor)
    trainer.run()
    lines = [line for line in capsys.readouterr().err.splitlines() if "guessing" in line]
    assert len(lines) == told
    assert all("tiny: step 0 has a cross-entropy of" in line and line.endswith(" wait") for line in lines)


# --- the loop ---


def test_the_gate_is_shut_for_the_final_score(tmp_path: Path) -> None:
    gates = []

    def validate() -> Evaluation:
        gates.append(trainer.driver.taper.gate.item())
        return Evaluation(nats=2.0, tokens=4, bytes=8)

    trainer = make_trainer(make_job(eval_every=6), tmp_path, validate=validate)
    score = trainer.run()
    schedule = GateSchedule(START, STEPS)
    assert gates == [np.float32(gate_at(5, schedule)), np.float32(gate_at(11, schedule)), 0.0]
    assert score.ce == 0.5
