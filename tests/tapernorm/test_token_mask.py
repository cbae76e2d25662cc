"""Padding is left out of every statistic and scale loss: a padded batch gives what the unpadded one gives.

B rows, T tokens of a row, D width 12; the real tokens of a row are 8, padded to 16 and 32 at either end.
"""

import copy
import inspect

import builders
import fakes
import numpy as np
import pytest
import reference
import torch
import torch.distributed as dist
from builders import array, close, normal
from ranked import together
from tiny_models import tiny
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel

from tapernorm.norms import TaperNorm
from tapernorm.schedule import GateSchedule
from tapernorm.taper import attach, taper_of
from tapernorm.util.errors import UserError
from tapernorm_lab.models.c_per_feature import make_featurewise
from tapernorm_lab.models.fakeln import attach_fakeln

B, T, EOS = 3, 8, 5
SIDES = ("left", "right")
LOSSES = {"anchor": {"anchor_weight": 0.3}, "level": {"level_weight": 0.2}}
SCHEDULE = GateSchedule(start=2, end=6)


def prepared(model):
    """In training mode, without dropout."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in ("dropout", "layerdrop"):
        for module in model.modules():
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def made(name="gpt2", dtype=torch.float64, **options):
    sizes = {"n_positions": 64} if name == "gpt2" else {"max_position_embeddings": 64}
    model = prepared(tiny(name, dtype=dtype, **sizes))
    return model, attach(model, final=True, ema_rate=0.3, schedule=SCHEDULE, **options)


def batch(seed, *, to=T, side="right"):
    """Keyword arguments of a model: B rows whose real tokens are the same for any `to` and `side`."""
    ids = builders.tokens(B, T, seed=seed)
    ids[:, 3] = EOS  # a real one counts
    pads = torch.full((B, to - T), EOS)
    ones, zeros = torch.ones(B, T, dtype=torch.int64), torch.zeros_like(pads)
    parts = ((pads, ids), (zeros, ones)) if side == "left" else ((ids, pads), (ones, zeros))
    ids, mask = (torch.cat(part, 1) for part in parts)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}


def taught(model, driver, batches, *, masked=True, given=None):
    """c, s_tgt and the losses past the calibration, of a taper that has seen these batches, one a step."""
    for k, some in enumerate(batches[:2]):
        driver.set_step(k)
        with driver.observe(given):
            model(**some)
            driver.anchor_loss()
    driver.set_step(SCHEDULE.start)
    losses = []
    for k, some in enumerate(batches[2:], start=SCHEDULE.start + 1):
        driver.set_step(k)
        with driver.observe(given):
            model(**some)
            losses.append(driver.anchor_loss().item())
    constants = torch.stack([model.get_submodule(name).c for name in driver.swapped])
    return {"c": constants, "s_tgt": driver.scale_target, "losses": torch.tensor(losses, dtype=torch.float64)}


def batches(**options):
    return [batch(seed, **options) for seed in range(4)]


def agree(found, expected, tolerance):
    return all(close(found[key], expected[key], tolerance) for key in expected)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("to", [16, 32])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_a_padded_batch_gives_the_constants_target_and_losses_of_the_unpadded_one(name, loss, to, side):
    expected = taught(*made(name, **LOSSES[loss]), batches())
    found = taught(*made(name, **LOSSES[loss]), batches(to=to, side=side))
    assert agree(found, expected, 1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_that_counted_would_be_seen(loss):
    """The control of the test above: the same batches with a mask that leaves nothing out of the statistics."""
    expected = taught(*made(**LOSSES[loss]), batches())
    ones = torch.ones(B, 16, dtype=torch.int64)
    found = taught(*made(**LOSSES[loss]), batches(to=16), given=ones)
    assert not any(close(found[key], expected[key], 1e-3) for key in ("c", "losses"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8])
def test_any_integer_mask_counts_where_it_is_not_zero_as_in_packed_rows(dtype):
    """Packed rows are told apart by numbers in the mask, 0 for padding."""
    expected = taught(*made(), batches(to=16))
    some = batches(to=16)
    for part in some:
        part["attention_mask"] = part["attention_mask"].to(dtype)
        if dtype is not torch.bool:
            part["attention_mask"][:, 4:T] *= 2
    assert agree(taught(*made(), some), expected, 0)


def test_gradients_of_both_losses_are_those_of_the_unpadded_batch():
    def gradients(**options):
        model, driver = made(anchor_weight=0.3, level_weight=0.2)
        taught(model, driver, batches(**options))
        model(**batch(9, **options))
        driver.anchor_loss().backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: gradient for name, gradient in found.items() if gradient.abs().max() > 1e-12}

    expected = gradients()
    assert {"transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"} <= expected.keys()
    for side in SIDES:
        found = gradients(to=16, side=side)
        assert all(close(found[name], gradient, 1e-10) for name, gradient in expected.items())


@pytest.mark.parametrize("side", SIDES)
def test_statistics_are_those_of_the_reference_over_real_tokens(side):
    """Against NumPy, with one hot token among the real ones and hotter padding; T is not D."""
    model, driver = made()
    mask = batch(2, to=16, side=side)["attention_mask"]
    real = mask.bool()
    h = normal(B, 16, 12)
    h[~real] *= 1e4
    h[0, 9 if side == "left" else 1] *= 30
    norm = model.transformer.ln_f
    driver.tokens.mask = mask
    with driver.observe():
        norm(h)
        driver.anchor_loss()
    kept = array(h[real][None])
    means = reference.calibration_means(kept, array(norm.weight), norm.eps, layer_norm=True)
    assert close(norm.statistics.value(), means)
    target = np.mean(reference.sigma(kept, norm.eps))
    assert driver._target.running.value().item() == pytest.approx(target, rel=1e-12)


def test_micro_batches_of_one_step_have_their_own_masks():
    """Rows of different lengths, each padded to the longest of its micro-batch, make one update of the real tokens."""
    rows = [builders.tokens(1, length, seed=length)[0] for length in (3, 8, 5, 6)]

    def padded(part):
        to = max(map(len, part))
        ids = torch.stack([torch.cat([row, torch.full((to - len(row),), EOS)]) for row in part])
        mask = torch.stack([(torch.arange(to) < len(row)).long() for row in part])
        return {"input_ids": ids, "attention_mask": mask}

    def means(parts):
        model, driver = made(anchor_weight=0.1)
        with driver.observe():
            for part in parts:
                model(**part)
                driver.anchor_loss()
        assert model.transformer.ln_f.statistics.updates == 1
        return torch.cat([driver._target.running.value(), model.transformer.h[1].ln_2.statistics.value()])

    alone = means([{"input_ids": row[None]} for row in rows])
    assert close(means([padded(rows[:2]), padded(rows[2:])]), alone)
    assert close(means([padded(rows)]), alone)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("together_", [False, True])
def test_activation_checkpointing_counts_no_token_by_the_mask_of_a_later_pass(reentrant, together_):
    def means(checkpointing):
        model, driver = made(anchor_weight=0.1)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        first, second = batch(1, to=16), batch(2, to=16, side="left")
        with driver.observe():
            losses = []
            for some in (first, second):
                losses.append(model(**some).logits.square().mean() + driver.anchor_loss())
                if not together_:
                    losses.pop().backward()
            for loss in losses:
                loss.backward()
            counts = [norm.statistics.count.item() for norm in model.modules() if isinstance(norm, TaperNorm)]
        return counts, model.transformer.h[0].ln_1.statistics.value()

    counts, expected = means(checkpointing=False)
    found_counts, found = means(checkpointing=True)
    assert counts == found_counts == [2 * B * T] * 5
    assert close(found, expected)


def test_a_constant_per_feature_leaves_padding_out_as_well():
    def constants(**options):
        model, driver = made()
        for name in driver.swapped:
            make_featurewise(model.get_submodule(name))
        return taught(model, driver, batches(**options))["c"]

    assert constants().shape == (5, 12)
    assert close(constants(to=16, side="left"), constants())


@pytest.mark.parametrize("side", SIDES)
def test_fakelns_mean_sigma_and_its_loss_leave_padding_out(side):
    """Also the first token of a row, which its loss leaves out, is the first real one."""

    def run(parts):
        model = fakes.gpt2(n_positions=64)
        driver = attach_fakeln(model, schedule=fakes.SCHEDULE, ema_rate=0.3, aux_weight=0.1, eot=fakes.EOT)
        losses = []
        for k, part in enumerate(parts):
            driver.set_step(k)
            with driver.observe():
                model(**part)
                losses.append(driver.auxiliary_loss(part["input_ids"]).item())
        found = torch.tensor([value for value in driver.constants.values() if value == value])
        return {"losses": torch.tensor(losses), "sigma_bar": found}

    expected = run(batches())
    assert expected["sigma_bar"].numel() > 1
    assert agree(run(batches(to=16, side=side)), expected, 1e-6)
    blind = [{**part, "attention_mask": None} for part in batches(to=16, side=side)]
    assert not any(close(found, expected[key], 1e-3) for key, found in run(blind).items())


# Several processes


def sharded(steps=4, **options):
    """What a rank has after a few steps under DistributedDataParallel: its statistics, its weights and its gate.

    Each rank has rows of other lengths, in two micro-batches a step; each of them shares its gradients.
    """
    model, driver = made(anchor_weight=0.1)
    parallel = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    means = []
    for k in range(steps):
        driver.set_step(2 * k)
        with driver.observe():
            for i in range(2):
                logits = parallel(**rank_batch(k, 2 * dist.get_rank() + i)).logits
                (logits.square().mean() + driver.anchor_loss()).backward()
        means.append(torch.cat([driver._target.running.value(), model.transformer.h[1].ln_2.statistics.value()]))
        optimizer.step()
        optimizer.zero_grad()
    return means, dict(model.named_parameters()), driver.gate.item()


def rank_batch(step, number):
    return batch(10 * step + number, to=T + 2 * number, side=SIDES[number % 2])


def refused_by(**options):
    try:
        sharded(**options)
    except UserError as error:
        return str(error)
    raise AssertionError("it was taken")


def test_ranks_of_ddp_share_the_sums_of_real_tokens_over_all_micro_batches(tmp_path):
    """DistributedDataParallel broadcasts buffers between micro-batches, and would replace a rank's sums by rank 0's."""
    (means, weights, gate), (other_means, other_weights, _) = together(tmp_path, sharded, find_unused_parameters=True)
    assert gate == 0
    assert all(torch.equal(a, b) for a, b in zip(means, other_means, strict=True))
    assert all(torch.equal(value, other_weights[name]) for name, value in weights.items())
    model, driver = made(anchor_weight=0.1)
    with driver.observe(), torch.no_grad():
        for number in range(4):
            model(**rank_batch(0, number))
            driver.anchor_loss()
    alone = torch.cat([driver._target.running.value(), model.transformer.h[1].ln_2.statistics.value()])
    assert close(means[0], alone)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True, "static_graph": True}])
def test_plain_ddp_is_told_in_its_first_pass_what_to_pass(tmp_path, options):
    (said,) = {*together(tmp_path, refused_by, **options)}
    assert "find_unused_parameters=True" in said
    assert "static_graph" in said


# Where the mask comes from


def test_the_mask_is_found_in_calls_of_the_model_and_of_its_trunk():
    model, driver = made()
    some = batch(3, to=16)
    ids, mask = some["input_ids"], some["attention_mask"]
    place = list(inspect.signature(model.transformer.forward).parameters).index("attention_mask")
    calls = {
        "by name": (lambda: model(input_ids=ids, attention_mask=mask), T),
        "by place": (lambda: model.transformer(ids, *[None] * (place - 1), mask), T),
        "none": (lambda: model(ids), 16),
    }
    for name, (call, length) in calls.items():
        with driver.observe():
            call()
            assert model.transformer.ln_f.statistics.count == B * length, name


def test_observe_takes_masks_for_a_model_that_has_none():
    def run(given, parts):
        model, driver = builders.attached(anchor_weight=0.3)
        with driver.observe(given):
            for part in parts:
                model(part)
                driver.anchor_loss()
        return torch.cat([norm.statistics.value() for norm in model.modules() if isinstance(norm, TaperNorm)])

    ids = builders.tokens(4, 7)
    padded = torch.cat([ids, torch.full((4, 3), EOS)], 1)
    mask = torch.cat([torch.ones(4, 7), torch.zeros(4, 3)], 1).bool()
    expected = run(None, [ids])
    assert close(run(mask, [padded]), expected)
    assert close(run([mask[:1], mask[1:]], [padded[:1], padded[1:]]), expected)
    assert not close(run(None, [padded]), expected, 1e-3)
    for given, parts in ([mask], [padded, padded]), ([mask, mask], [padded]), (mask[:, :7], [padded]):
        with pytest.raises(UserError, match="mask"):
            run(given, parts)
    model, driver = builders.attached()
    for wrong in (mask[:2], [mask.tolist()], 7):
        with pytest.raises(UserError, match="mask"), driver.observe(wrong):
            model(padded)
    assert all(norm.statistics.count == 0 for norm in model.modules() if isinstance(norm, TaperNorm))


def test_what_observe_was_given_goes_before_the_mask_of_the_call_and_holds_past_the_calibration():
    model, driver = made(anchor_weight=0.3)
    mask = batch(0, to=16)["attention_mask"]
    some = [{k: v for k, v in part.items() if k != "attention_mask"} for part in batches(to=16)]
    expected = taught(*made(anchor_weight=0.3), batches())
    assert agree(taught(model, driver, some, given=mask), expected, 1e-12)


@pytest.mark.parametrize(
    ("mask", "word"),
    [
        (torch.ones(B, 1, 16, 16, dtype=torch.int64), "(3, 1, 16, 16)"),
        (torch.ones(B, 16), "float32"),
        (torch.ones(B, 15, dtype=torch.int64), "(3, 15)"),
        (torch.ones(B, 17, dtype=torch.int64), "(3, 17)"),
        (torch.ones(B - 1, 16, dtype=torch.int64), "(2, 16)"),
        ({"full_attention": torch.ones(B, 1, 16, 16)}, "dict"),
    ],
)
def test_another_kind_of_mask_is_refused_where_it_would_be_used_and_only_there(mask, word):
    model, driver = made()
    norm, h = model.transformer.ln_f, normal(B, 16, 12)
    driver.tokens.mask = mask
    norm(h)  # nothing is observed
    with pytest.raises(UserError) as refused, driver.observe():
        norm(h)
    assert word in str(refused.value)
    assert "observe(mask=" in str(refused.value)


def test_keys_of_earlier_tokens_stand_before_those_of_the_pass():
    """With a cache the mask is wider than the pass; its last columns are those of the pass."""
    model, driver = made("llama")
    whole = batch(1, to=16, side="left")
    counted = []
    with driver.observe():
        first = model(input_ids=whole["input_ids"][:, :10], attention_mask=whole["attention_mask"][:, :10])
        counted.append(model.model.norm.statistics.count.item())
        model(
            input_ids=whole["input_ids"][:, 10:],
            attention_mask=whole["attention_mask"],
            cache=first.cache,
        )
        counted.append(model.model.norm.statistics.count.item())
    assert counted == [B * 2, B * T]


# What stays


def test_a_copy_reads_masks_of_its_own_and_a_moved_model_still_reads_its_own():
    model, driver = made(dtype=torch.float32)
    twin = copy.deepcopy(model)
    twin(**batch(1, to=16))
    assert driver.tokens.mask is None
    assert taper_of(twin).tokens.mask is not None
    model.double()(**batch(1, to=32))
    assert driver.tokens.mask.shape == (B, 32)
    driver.detach()
    assert not model.transformer._forward_pre_hooks


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_tells_the_taper_outside_which_tokens_counted():
    """torch.compile(model) after attach, the scale loss outside of the graph."""
    expected = taught(*made("llama", torch.float32, anchor_weight=0.3), batches(to=16))
    model, driver = made("llama", torch.float32, anchor_weight=0.3)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    found = []
    for k, some in enumerate(batches(to=16)):
        driver.set_step(k if k < 2 else k + 1)
        with driver.observe():
            compiled(**some)
            found.append(driver.anchor_loss().item())
    assert close(torch.tensor(found[2:]), expected["losses"], 1e-5)
    assert close(driver.scale_target, expected["s_tgt"], 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("loss", LOSSES)
def test_a_compiled_step_with_masks_takes_three_graphs_over_a_whole_taper(loss):
    def step(model, driver, some):
        logits = model(**some).logits
        return logits.square().mean(), driver.anchor_loss()

    def run(step, model, driver):
        found = []
        for k in range(SCHEDULE.end + 2):
            driver.set_step(k)
            with driver.observe():
                ce, aux = step(model, driver, batch(k, to=16, side=SIDES[k % 2]))
                (ce + aux).backward()
            model.zero_grad()
            found.append(ce.item() + aux.item())
        return found, driver.constants

    counter = CompileCounter()
    losses, constants = run(
        torch.compile(step, backend=counter, fullgraph=True, dynamic=False),
        *made("llama", torch.float32, **LOSSES[loss]),
    )
    eager_losses, eager_constants = run(step, *made("llama", torch.float32, **LOSSES[loss]))
    assert counter.frame_count == 3
    assert losses == pytest.approx(eager_losses, rel=1e-5)
    assert constants == pytest.approx(eager_constants, rel=1e-5)
