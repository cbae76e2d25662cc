"""TaperCallback in the Trainer of transformers: gate, statistics, loss, checkpoints, against a loop of our own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from builders import close, snapshot
from tiny_models import tiny
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

from tapernorm import GateSchedule, TaperCallback, attach, fold
from tapernorm.architectures import logits_of
from tapernorm.taper import taper_of
from tapernorm.util.errors import UserError

STEPS, MICRO, ACCUMULATED, T = 7, 2, 3, 11
SCHEDULE = GateSchedule(start=2, end=5)
LR, WEIGHT, RATE = 1e-2, 0.3, 0.2


def rows(count=STEPS * MICRO * ACCUMULATED):
    """Every other row has fewer targets, so that micro-batches differ in their number."""
    ids = torch.randint(29, (count, T), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[::4, T // 2 :] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def attached(name="llama"):
    model = tiny(name, dtype=torch.float32)
    return model, attach(model, final=True, schedule=SCHEDULE, ema_rate=RATE, anchor_weight=WEIGHT)


class InOrder(Trainer):
    """Rows in their order, so that a loop of our own sees the same batches."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def trainer_of(model, callback, folder, **options):
    settings = {"max_steps": STEPS, "lr_scheduler_type": "constant", "learning_rate": LR, "weight_decay": 0.0}
    settings |= {"save_strategy": "no", "optim": "sgd"}
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ACCUMULATED,
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        disable_tqdm=True,
        **{**settings, **options},
    )
    return InOrder(model, arguments, train_dataset=rows(), callbacks=[callback], compute_loss_func=callback.loss)


def by_hand(model, taper, *, first_counts):
    """The same training in a loop of our own; micro-batches weigh by their targets, or by their labels."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)  # Adam would blow up the rounding of zero gradients
    model.train()
    size = MICRO * ACCUMULATED
    for k in range(STEPS):
        batch = rows()[k * size : (k + 1) * size]
        ids, labels = (torch.stack([row[key] for row in batch]) for key in ("input_ids", "labels"))
        taper.set_step(k)
        with taper.observe():
            total = torch.zeros(())
            first = 0 if first_counts else 1
            for some, theirs in zip(ids.split(MICRO), labels.split(MICRO), strict=True):
                logits = logits_of(model, some)
                ce = F.cross_entropy(logits[:, :-1].reshape(-1, 29), theirs[:, 1:].reshape(-1))
                share = (theirs[:, first:] != -100).sum() / (labels[:, first:] != -100).sum()
                total = total + share * (ce + taper.anchor_loss())
            total.backward()
        optimizer.step()
        optimizer.zero_grad()
    taper.set_step(STEPS)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_trainer_trains_what_a_plain_loop_trains(name, tmp_path):
    model, taper = attached(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    twin = copy.deepcopy(model)
    trainer_of(model, TaperCallback(taper), tmp_path).train()
    by_hand(twin, taper_of(twin), first_counts=name == "gpt2")
    ids = torch.stack([row["input_ids"] for row in rows(4)])
    assert close(logits_of(model.eval(), ids), logits_of(twin.eval(), ids), 1e-5)
    for norm in taper.swapped:
        found, expected = model.get_submodule(norm), twin.get_submodule(norm)
        assert close(found.c, expected.c, 1e-5)
        assert close(found.gamma_t, expected.gamma_t, 1e-4)
    assert taper.gate.item() == 0
    assert close(taper.scale_target, taper_of(twin).scale_target, 1e-6)
    assert not close(logits_of(model, ids), logits_of(attached(name)[0], ids), 0.1)


def test_statistics_move_once_per_optimizer_step_and_stop_with_the_taper(tmp_path):
    model, taper = attached()
    seen = []
    callback = TaperCallback(taper)
    stock = callback.on_pre_optimizer_step

    def spy(*arguments, **named):
        stock(*arguments, **named)
        norm = model.model.norm
        seen.append((taper.gate.item(), int(norm.statistics.updates)))

    callback.on_pre_optimizer_step = spy
    trainer_of(model, callback, tmp_path).train()
    gates, updates = zip(*seen, strict=True)
    assert updates == (1, 2, 2, 2, 2, 2, 2)  # three micro-batches each
    assert close(torch.tensor(gates), torch.tensor([1, 1, 1, 0.75, 0.25, 0, 0]), 1e-6)


def pad(side, extra):
    """A collator that pads on `side` to the longest row and `extra` tokens more, with a token that is no target."""

    def collate(some):
        to = max(len(row["input_ids"]) for row in some) + extra
        made = {"input_ids": [], "labels": [], "attention_mask": []}
        for row in some:
            spare = to - len(row["input_ids"])
            values = {**row, "attention_mask": torch.ones_like(row["input_ids"])}
            values["labels"][0] = -100  # behind padding at the left, a first token would be a target
            for key, fill in (("input_ids", 7), ("labels", -100), ("attention_mask", 0)):
                made[key].append(F.pad(values[key], (spare, 0) if side == "left" else (0, spare), value=fill))
        return {key: torch.stack(values) for key, values in made.items()}

    return collate


def trained_on_unequal_rows(folder, side, extra):
    model, taper = attached("llama")
    callback = TaperCallback(taper)
    trainer = trainer_of(model, callback, folder)
    trainer.train_dataset = [
        {key: value[: T - 3 * (i % 3)] for key, value in row.items()} for i, row in enumerate(rows())
    ]
    trainer.data_collator = pad(side, extra)
    trainer.train()
    return {"c": torch.tensor(list(taper.constants.values())), "s_tgt": taper.scale_target}


def test_padding_of_the_collator_counts_in_no_statistic(tmp_path):
    """Rows of 5, 8 and 11 tokens: what they are padded to, and where, changes no constant."""
    found = {
        key: trained_on_unequal_rows(tmp_path / str(i), *key)
        for i, key in enumerate([("right", 0), ("right", 5), ("left", 5)])
    }
    expected = found.pop(("right", 0))
    for key, constants in found.items():
        for name, value in constants.items():
            assert close(value, expected[name], 1e-5), (key, name)


def test_the_scale_target_is_observed_without_the_loss_too(tmp_path):
    model, taper = attached()
    trainer = trainer_of(model, TaperCallback(taper), tmp_path)
    trainer.compute_loss_func = None
    trainer.train()
    assert taper.scale_target.isfinite()


def test_an_evaluation_scores_cross_entropy_alone_and_observes_nothing(tmp_path):
    model, taper = attached()
    trainer = trainer_of(model, TaperCallback(taper), tmp_path)
    trainer.train()
    before = snapshot(taper.state_dict())
    found = trainer.evaluate(rows(6))["eval_loss"]
    ids, labels = (torch.stack([row[key] for row in rows(6)]) for key in ("input_ids", "labels"))
    logits = logits_of(model.eval(), ids)[:, :-1]
    assert found == pytest.approx(F.cross_entropy(logits.reshape(-1, 29), labels[:, 1:].reshape(-1)).item(), rel=1e-5)
    assert snapshot(taper.state_dict()) == before
    assert taper.anchor_loss().item() > 1e-3  # it would have shown


@pytest.mark.parametrize("at", [1, 4])
def test_a_resumed_run_is_the_uninterrupted_one(at, tmp_path):
    whole, taper = attached()
    trainer_of(whole, TaperCallback(taper), tmp_path / "whole").train()
    first, driver = attached()
    saving = {"save_strategy": "steps", "save_steps": at}
    trainer_of(first, TaperCallback(driver), tmp_path / "cut", **saving).train()
    again, resumed = attached()
    checkpoint = tmp_path / "cut" / f"checkpoint-{at}"
    assert (checkpoint / "taper.pt").is_file()
    trainer_of(again, TaperCallback(resumed), tmp_path / "cut").train(resume_from_checkpoint=str(checkpoint))
    assert snapshot(again.state_dict()) == snapshot(whole.state_dict())
    assert snapshot(resumed.state_dict()) == snapshot(taper.state_dict())
    (checkpoint / "taper.pt").unlink()
    last, lost = attached()
    with pytest.raises(UserError, match=r"taper.pt is missing"):
        trainer_of(last, TaperCallback(lost), tmp_path / "cut").train(resume_from_checkpoint=str(checkpoint))


def test_an_optimizer_built_before_attach_is_refused(tmp_path):
    model = tiny("llama", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    callback = TaperCallback(attach(model, schedule=SCHEDULE))
    trainer = trainer_of(model, callback, tmp_path)
    trainer.optimizer = optimizer
    with pytest.raises(UserError, match="gamma_t"):
        trainer.train()


def test_a_gate_that_falls_until_the_last_step_is_at_zero_afterwards(tmp_path):
    model = tiny("llama", dtype=torch.float32)
    taper = attach(model, schedule=GateSchedule(start=2, end=STEPS))
    trainer_of(model, TaperCallback(taper), tmp_path).train()
    assert taper.gate.item() == 0
    fold(model)


def test_a_schedule_that_outlasts_the_training_or_is_missing_is_refused(tmp_path):
    model, taper = attached()
    with pytest.raises(UserError, match="step 5 and training ends at 4"):
        trainer_of(model, TaperCallback(taper), tmp_path, max_steps=4).train()
    with pytest.raises(UserError, match="needs a schedule"):
        TaperCallback(attach(tiny("llama")))
