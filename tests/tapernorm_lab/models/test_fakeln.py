"""The driver of FakeLN: attach, staged removals, mean sigmas, auxiliary loss, state, generation, compilation."""

import copy
from collections import Counter

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from builders import array, close, decoder, snapshot
from fakes import CONTEXT, DEPTH, EOT, EPS, LAST, SCHEDULE, STAGES, fake_norms, gpt2, reference_logits
from torch._dynamo.testing import CompileCounter
from torch.overrides import TorchFunctionMode

from tapernorm.folding import fold
from tapernorm.schedule import GateSchedule
from tapernorm.taper import attach, taper_of
from tapernorm.util.errors import UserError
from tapernorm.util.rng import generator
from tapernorm_lab.config.fakeln_schedule import FakeSchedule, removed_at
from tapernorm_lab.models.fakeln import attach_fakeln

REMOVALS = {  # step -> what it removes
    2: ["transformer.h.0.ln_2"],
    3: ["transformer.h.1.ln_2"],
    4: ["transformer.h.2.ln_2"],
    5: ["transformer.h.0.ln_1.qk"],
    7: ["transformer.h.1.ln_1.qk"],
    9: ["transformer.h.2.ln_1.qk", "transformer.h.0.ln_1.v"],
    12: ["transformer.h.1.ln_1.v"],
    15: ["transformer.h.2.ln_1.v"],
    17: ["transformer.ln_f"],
}
SITES = [site for sites in REMOVALS.values() for site in sites]
NORMS = [*(f"transformer.h.{i}.{norm}" for i in range(DEPTH) for norm in ("ln_1", "ln_2")), "transformer.ln_f"]


def norm_of(site):
    return site.removesuffix(".qk").removesuffix(".v")


def tokens(batch=6, time=7, seed=5):
    return torch.randint(EOT + 1, 29, (batch, time), generator=generator(seed, "tests"))


def attached(*, ema_rate=1.0, aux_weight=0.1, schedule=SCHEDULE, **options):
    model = gpt2(**options)
    return model, attach_fakeln(model, schedule=schedule, ema_rate=ema_rate, aux_weight=aux_weight, eot=EOT)


def logits(model, ids, **options):
    return model(ids, use_cache=False, **options).logits


def training_loss(model, driver, ids):
    """Cross-entropy and auxiliary loss of windows (B, T+1)."""
    out = logits(model, ids[:, :-1])
    return F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten()) + driver.auxiliary_loss(ids[:, :-1])


def train_step(model, driver, k, rate=0.03, split=(6,)):
    """One step of plain gradient descent on batch k."""
    driver.set_step(k)
    model.zero_grad()
    with driver.observe():
        for rows in tokens(6, 8, seed=k).split(list(split)):
            (training_loss(model, driver, rows) * (len(rows) / 6)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(rate * parameter.grad)


def trained_to(step, **options):
    """Trained for the steps before `step`, and set to it."""
    model, driver = attached(**options)
    for k in range(step):
        train_step(model, driver, k)
    driver.set_step(step)
    return model, driver


def mean_sigmas(model, ids):
    """Norm -> the mean over tokens of the standard deviation of what it reads, in NumPy."""
    seen = {}

    def keep(name):
        return lambda _, args: seen.update({name: array(args[0])})

    hooks = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in NORMS]
    with torch.no_grad():
        logits(model, ids)
    for hook in hooks:
        hook.remove()
    return {name: reference.sigma(h, EPS).mean() for name, h in seen.items()}


# Attach


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {"layer_norm_epsilon": 0.3}),
        (torch.bfloat16, {"scale_attn_by_inverse_layer_idx": True}),
        (torch.float32, {"reorder_and_upcast_attn": True, "attention": "eager"}),
    ],
    ids=str,
)
def test_until_the_first_removal_logits_and_gradients_are_bitwise_those_of_the_plain_model(dtype, training, options):
    plain = gpt2(dtype=dtype, **options).train(training)
    model = copy.deepcopy(plain)
    driver = attach_fakeln(model, schedule=SCHEDULE, aux_weight=0.1, eot=EOT)
    driver.set_step(SCHEDULE.mlp_start - 1)
    outputs = []
    with driver.observe():
        for m in (plain, model):
            out = logits(m, tokens())
            out.float().square().mean().backward()
            outputs.append([out, *(p.grad for p in m.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    if training:  # what the equality would have caught
        driver.set_step(SCHEDULE.mlp_start)
        assert not torch.equal(logits(model, tokens()), outputs[0][0])


def test_attaching_keeps_the_parameters_and_adds_one_buffer_per_norm():
    plain, (model, _) = gpt2(), attached()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert model.state_dict().keys() - plain.state_dict().keys() == {f"{name}.sigma_bars" for name in NORMS}
    assert list(fake_norms(model)) == NORMS


def test_saving_an_attached_model_leaves_nothing_that_loads_as_a_stock_one(tmp_path):
    """Its weights in a stock GPT-2 would normalise again."""
    model, _ = attached()
    model.save_pretrained(tmp_path)
    with pytest.raises(Exception, match="no stock model: its norms are tapered, fixed or gone"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.nn.Linear(3, 4), "FakeLN takes a GPT2LMHeadModel of transformers, got a Linear"),
        (decoder(), "got a Decoder"),
        (gpt2(add_cross_attention=True), "add_cross_attention"),
    ],
)
def test_other_architectures_are_refused(model, message):
    with pytest.raises(UserError, match=message):
        attach_fakeln(model, schedule=SCHEDULE, aux_weight=0.1, eot=EOT)


def test_a_model_carries_one_driver_whichever_came_first():
    model, driver = attached()
    tapered = gpt2()
    attach(tapered, schedule=GateSchedule(1, 2))
    for carrier, again in ((model, tapered_again), (model, faked_again), (tapered, faked_again)):
        classes = [type(m) for m in carrier.modules()]
        with pytest.raises(UserError, match="attached already"):
            again(carrier)
        assert [type(m) for m in carrier.modules()] == classes
    assert taper_of(model) is driver


def tapered_again(model):
    attach(model, schedule=GateSchedule(1, 2))


def faked_again(model):
    attach_fakeln(model, schedule=SCHEDULE, aux_weight=0.1, eot=EOT)


def test_a_model_with_other_norms_or_a_schedule_that_overlaps_is_refused_and_stays():
    odd = gpt2()
    odd.transformer.h[2].ln_2 = torch.nn.RMSNorm(12)
    with pytest.raises(UserError, match=r"transformer\.h\.2\.ln_2 is RMSNorm"):
        faked_again(odd)
    deep = gpt2(n_layer=4)
    with pytest.raises(UserError, match=r"0\.ln_1\.v .*step 9, .*transformer\.h\.3\.ln_1\.qk at step 11"):
        faked_again(deep)
    assert not fake_norms(odd)
    assert not fake_norms(deep)
    roomy = FakeSchedule(**{**vars(SCHEDULE), "v_start": 11, "final": 20})
    attach_fakeln(deep, schedule=roomy, aux_weight=0.1, eot=EOT)


# Removals


def test_the_removed_sites_are_the_written_ones_at_every_step():
    model, driver = attached()
    assert driver.removals == {site: k for k, sites in REMOVALS.items() for site in sites}
    gone = []
    for k in range(LAST + 3):
        train_step(model, driver, k)
        gone += REMOVALS.get(k, [])
        assert driver.removed == tuple(gone) == removed_at(k, SCHEDULE, DEPTH)
        frozen = [site for site, bar in driver.constants.items() if not np.isnan(bar)]
        assert frozen == gone
        assert driver.row() == {"gate": 1 - len(gone) / 10, "removed": len(gone), "scale_target": None}
        assert driver.scale_target is None
    assert gone == SITES


class Calls(TorchFunctionMode):
    """Counts the calls of each function."""

    def __init__(self):
        super().__init__()
        self.of = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.of[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("step", "normalising"), [(0, 7), (3, 5), (9, 3), (12, 2), (15, 1), (16, 1), (LAST, 0)])
def test_a_removed_site_computes_no_statistic_of_its_tokens(step, normalising):
    model, driver = trained_to(step)
    with Calls() as calls, driver.observe():
        logits(model, tokens())
    assert calls.of[F.layer_norm] == normalising
    assert calls.of[torch.Tensor.sqrt] == normalising  # sigma, for the running means


@pytest.mark.parametrize(
    ("ema_rate", "split", "checkpointing"), [(1.0, [6], False), (0.3, [2, 2, 2], True), (0.3, [1, 2, 3], False)]
)
def test_sigma_bar_is_the_running_mean_of_sigma_up_to_the_step_before(ema_rate, split, checkpointing):
    model, driver = attached(ema_rate=ema_rate)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    seen = []
    for k in range(LAST):
        driver.set_step(k)
        whole = tokens(6, 8, seed=k)[:, :-1]
        for site in REMOVALS.get(k, []):
            expected = reference.corrected_ema([means[norm_of(site)] for means in seen], ema_rate)
            assert driver.constants[site] == pytest.approx(expected, rel=1e-12)
            if ema_rate < 1:
                assert driver.constants[site] != pytest.approx(seen[-1][norm_of(site)], rel=1e-5)
        seen.append(mean_sigmas(model, whole))
        train_step(model, driver, k, split=split)
    updates = {name: norm.statistics.updates.item() for name, norm in fake_norms(model).items()}
    assert updates["transformer.h.0.ln_2"] == 2
    assert updates["transformer.h.0.ln_1"] == 9  # v goes on after q and k
    assert updates["transformer.ln_f"] == LAST


def test_unequal_micro_batches_weigh_by_their_tokens():
    model, driver = attached()
    parts = tokens().split([1, 5])
    means = [mean_sigmas(model, part)["transformer.ln_f"] for part in parts]
    with driver.observe():
        for part in parts:
            logits(model, part)
    driver.set_step(LAST)
    assert driver.constants["transformer.ln_f"] == pytest.approx((means[0] + 5 * means[1]) / 6, rel=1e-12)
    assert driver.constants["transformer.ln_f"] != pytest.approx((means[0] + means[1]) / 2, rel=1e-4)


def test_a_recomputed_forward_pass_is_seen_twice_and_counts_once():
    model, driver = attached()
    model.activation_checkpointing_enable({"use_reentrant": False})
    with driver.observe():
        training_loss(model, driver, tokens(6, 8)).backward()
        counts = {name: norm.statistics.count.item() for name, norm in fake_norms(model).items()}
    assert counts["transformer.h.1.ln_1"] == 2 * 6 * 7
    assert counts["transformer.ln_f"] == 6 * 7
    assert {norm.statistics.updates.item() for norm in fake_norms(model).values()} == {1}


def test_a_jump_over_removals_freezes_what_was_not_and_leaves_what_was():
    model, driver = trained_to(4)
    before = dict(driver.constants)
    driver.set_step(13)
    after = driver.constants
    assert driver.removed == removed_at(13, SCHEDULE, DEPTH)
    for site in SITES:
        if site in removed_at(4, SCHEDULE, DEPTH):
            assert after[site] == before[site]
        elif site in driver.removed:
            mean = model.get_submodule(norm_of(site)).statistics.value().item()
            assert after[site] == mean
        else:
            assert np.isnan(after[site])


def test_going_back_restores_the_norms_and_coming_again_the_same_sigma_bar():
    model, driver = trained_to(13)
    before, constants = logits(model, tokens()), dict(driver.constants)
    driver.set_step(0)
    assert driver.removed == ()
    plain = gpt2()
    plain.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(logits(model, tokens()), logits(plain, tokens()))
    with driver.observe():
        logits(model, tokens(seed=9))
    driver.set_step(13)
    assert torch.equal(logits(model, tokens()), before)
    assert snapshot(driver.constants) == pytest.approx(snapshot(constants), nan_ok=True)


def test_a_removal_before_any_observation_is_refused_and_changes_nothing():
    model, driver = attached()
    before = snapshot(model.state_dict()), snapshot(driver.state_dict())
    with pytest.raises(UserError, match=r"cannot remove transformer\.h\.0\.ln_2 after 0 updates.*FakeLN\.observe"):
        driver.set_step(SCHEDULE.mlp_start)
    assert (snapshot(model.state_dict()), snapshot(driver.state_dict())) == before
    assert driver.removed == ()


# When nothing is collected


def evaluation(model, driver):
    model.eval()
    with driver.observe():
        logits(model, tokens())
    model.train()


def outside(model, driver):
    training_loss(model, driver, tokens())


def interrupted(model, driver):
    def step():
        with driver.observe():
            logits(model, tokens())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()


@pytest.mark.parametrize("act", [evaluation, outside, interrupted])
@pytest.mark.parametrize("step", STAGES)
def test_no_state_changes(act, step):
    model, driver = trained_to(step)
    before = snapshot(model.state_dict()), snapshot(driver.state_dict())
    act(model, driver)
    assert (snapshot(model.state_dict()), snapshot(driver.state_dict())) == before
    with driver.observe():
        logits(model, tokens())
    assert (snapshot(driver.state_dict()) != before[1]) == (step < LAST)  # what was withheld


# Auxiliary loss


def test_the_auxiliary_loss_of_a_hand_computed_batch():
    model, driver = attached(aux_weight=0.3)
    ids = torch.tensor([[4, 7, EOT, 5], [EOT, 9, 3, EOT]])
    logits(model, ids)
    scales = np.array([[1.0, 2.0, 50.0, 4.0], [30.0, 3.0, 6.0, 20.0]])
    width = model.config.n_embd
    direction = np.tile([1.0, -1.0], width // 2)  # centred, of unit scale
    h = np.sqrt(scales**2 - EPS)[..., None] * direction + 7.0
    driver._probe.hidden = torch.tensor(h)
    target = (2.0 + 4.0 + 3.0 + 6.0) / 4  # neither column 0 nor end-of-text
    expected = 0.3 * np.mean((scales - target) ** 2)  # over all eight
    assert driver.auxiliary_loss(ids).item() == pytest.approx(expected, rel=1e-12)
    assert (expected, target) == pytest.approx(reference.moving_target_loss(scales, ids.numpy(), EOT, 0.3), rel=1e-12)
    driver.eot = None
    everything_but_first = np.delete(scales, 0, axis=1).mean()
    expected = 0.3 * np.mean((scales - everything_but_first) ** 2)
    assert driver.auxiliary_loss(ids).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("step", STAGES)
def test_the_auxiliary_loss_is_that_of_the_reference_at_every_stage(step):
    model, driver = trained_to(step, aux_weight=0.3)
    ids = tokens()
    ids[2, 3] = ids[4, 0] = ids[5, 6] = EOT
    seen = []
    hook = model.transformer.ln_f.register_forward_pre_hook(lambda _, args: seen.append(array(args[0])))
    logits(model, ids)
    hook.remove()
    scales = reference.sigma(seen[0], EPS)[..., 0]
    expected, _ = reference.moving_target_loss(scales, ids.numpy(), EOT, 0.3)
    assert driver.auxiliary_loss(ids).item() == pytest.approx(expected, rel=1e-12)
    for other in (0.3 * np.var(scales), reference.moving_target_loss(scales, ids.numpy(), -1, 0.3)[0]):
        assert other != pytest.approx(expected, rel=1e-5)  # with position 0, with end-of-text


def test_no_gradient_passes_through_the_auxiliary_target():
    model, driver = attached(aux_weight=0.3)
    ids = tokens()
    ids[2, 3] = EOT
    logits(model, ids)
    h = driver._probe.hidden
    gradient = torch.autograd.grad(driver.auxiliary_loss(ids), h, retain_graph=True)[0]
    scales = reference.sigma(array(h), EPS)[..., 0]
    target = reference.moving_target_loss(scales, ids.numpy(), EOT, 0.3)[1]
    assert close(gradient, reference.anchor_gradient(array(h), target, 0.3, EPS, layer_norm=True))
    sigma = driver._probe.scale(model.transformer.ln_f)[..., 0]
    kept = (ids != EOT) & (torch.arange(ids.shape[1]) > 0)
    attached_target = 0.3 * (sigma - sigma[kept].mean()).square().mean()
    assert not close(gradient, torch.autograd.grad(attached_target, h)[0], 1e-3)


def test_a_batch_without_any_token_for_the_target_costs_nothing_and_stays_finite():
    model, driver = attached()
    ids = torch.full((2, 5), EOT)
    logits(model, ids)
    loss = driver.auxiliary_loss(ids)
    loss.backward()
    assert loss.item() == 0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_at_weight_zero_there_is_no_auxiliary_loss():
    model, driver = attached(aux_weight=0.0)
    logits(model, tokens())
    loss = driver.auxiliary_loss(tokens())
    assert loss.item() == 0
    assert not loss.requires_grad


def test_each_micro_batch_has_its_own_target():
    model, driver = attached()
    losses, targets = [], []
    for rows in (tokens(), *tokens().split(3)):
        logits(model, rows)
        losses.append(driver.auxiliary_loss(rows).item())
        scales = array(driver._probe.scale(model.transformer.ln_f))[..., 0]
        targets.append(reference.moving_target_loss(scales, rows.numpy(), EOT, 0.1)[1])
    assert len(set(targets)) == 3
    assert losses[0] != pytest.approx((losses[1] + losses[2]) / 2, rel=1e-6)


# Forward at every stage


@pytest.mark.parametrize("step", STAGES)
def test_logits_are_those_of_a_second_gpt2_at_every_stage(step):
    model, driver = trained_to(step)
    ids = tokens()
    assert close(logits(model, ids), reference_logits(model, ids))
    mixed = len(set(driver.removed)) > DEPTH
    assert close(logits(model, ids), reference_logits(model, ids, swap=True), 1e-6) != mixed


def test_no_gradient_reaches_sigma_bar_and_gains_go_on_training_once_removed():
    model, driver = trained_to(LAST)
    model.zero_grad()
    training_loss(model, driver, tokens(6, 8)).backward()
    for norm in fake_norms(model).values():
        assert norm.sigma_bars.grad is None
        assert norm.weight.grad.abs().min() > 0
        assert norm.bias.grad.abs().max() > 0


@pytest.mark.parametrize("step", STAGES)
def test_a_cache_gives_the_logits_of_a_whole_pass_at_every_split(step):
    model, _ = trained_to(step)
    model.eval()
    ids = tokens(2, 9)
    whole = logits(model, ids)
    for at in range(1, 9):
        first = model(ids[:, :at], use_cache=True)
        second = model(ids[:, at:], cache=first.cache, use_cache=True)
        assert close(torch.cat([first.logits, second.logits], 1), whole)


@pytest.mark.parametrize("step", STAGES)
def test_left_padding_changes_nothing(step):
    model, _ = trained_to(step)
    model.eval()
    ids, pad = tokens(2, 6), 3
    padded = F.pad(ids, (pad, 0), value=EOT)
    mask = F.pad(torch.ones_like(ids), (pad, 0))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = logits(model, padded, attention_mask=mask, position_ids=positions)[:, pad:]
    assert close(out, logits(model, ids))
    assert not close(logits(model, padded)[:, pad:], logits(model, ids), 1e-3)


def test_bfloat16_autocast_keeps_sigma_wide_and_trains_through_every_stage():
    model, driver = attached(dtype=torch.float32)
    for k in range(LAST + 1):
        with torch.autocast("cpu", torch.bfloat16):
            train_step(model, driver, k)
        out = logits(model, tokens())
        assert out.isfinite().all()
    assert {norm.sigma_bars.dtype for norm in fake_norms(model).values()} == {torch.float32}
    wide = copy.deepcopy(model).double()
    with torch.autocast("cpu", torch.bfloat16):
        narrow = logits(model, tokens())
    error = (narrow.double() - logits(wide, tokens())).abs().max() / narrow.abs().max()
    assert 1e-6 < error < 0.1


# Folding


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_inner": 12},
        {"tie_word_embeddings": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True, "attention": "eager", "dtype": torch.float32},
    ],
    ids=str,
)
def test_folding_everything_changes_no_logit(options):
    model, _ = trained_to(LAST, **options)
    tolerance = 1e-12 if "dtype" not in options else 1e-5
    model.eval()
    folded, report = fold(model)
    names = {name for name, _ in folded.named_modules()}
    assert all(isinstance(folded.get_submodule(name), torch.nn.Identity) for name in NORMS)
    assert {type(m).__name__ for m in folded.modules()}.isdisjoint({"FakeLayerNorm", "SplitConv1D", "LayerNorm"})
    assert {f"transformer.h.{i}.attn.c_attn" for i in range(DEPTH)} <= names
    assert close(logits(folded, tokens()), logits(model, tokens()), tolerance)
    assert torch.equal(folded.transformer.wte.weight, model.transformer.wte.weight)
    assert [norm.name for norm in report.norms] == NORMS
    ids, pad = tokens(2, 6), 3
    padding = {"attention_mask": F.pad(torch.ones_like(ids), (pad, 0))}
    padded = F.pad(ids, (pad, 0), value=EOT)
    assert close(logits(folded, padded, **padding), logits(model, padded, **padding), tolerance)
    first = folded(ids[:, :2], use_cache=True)
    second = folded(ids[:, 2:], cache=first.cache, use_cache=True)
    assert close(second.logits, logits(model, ids)[:, 2:], tolerance)
    made = [
        m.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=EOT)
        for m in (model, folded)
    ]
    assert torch.equal(*made)


@pytest.mark.parametrize("step", STAGES[1:])
def test_folding_with_q_and_ks_sigma_for_v_or_the_reverse_would_be_noticed(step):
    model, driver = trained_to(step)
    model.eval()
    driver.set_step(LAST)
    before = logits(model, tokens())
    for norm in fake_norms(model).values():
        norm.sigma_bars.copy_(norm.sigma_bars.flip(0))
    folded, report = fold(model)
    assert report.largest_logit_difference < 1e-11
    assert close(logits(folded, tokens()), before, 1e-6) == (step < 6)  # until then both are frozen together


@pytest.mark.parametrize("step", STAGES[:-1])
def test_a_model_that_still_normalises_somewhere_cannot_be_folded(step):
    model, _ = trained_to(step)
    with pytest.raises(UserError, match="still normalises"):
        fold(model)


# State


@pytest.mark.parametrize("stop", [1, 4, 9, LAST, LAST + 1])
def test_the_state_round_trips_and_training_goes_on_bitwise(stop):
    model, driver = attached(ema_rate=0.3)
    for k in range(stop):
        train_step(model, driver, k)
    other, resumed = attached(ema_rate=0.3, seed=9)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(driver.state_dict())
    assert snapshot(resumed.state_dict()) == snapshot(driver.state_dict())
    assert resumed.removed == driver.removed
    assert torch.equal(logits(other, tokens()), logits(model, tokens()))
    for k in range(stop, min(stop + 4, LAST + 2)):
        train_step(model, driver, k)
        train_step(other, resumed, k)
    assert snapshot(resumed.state_dict()) == snapshot(driver.state_dict())
    assert snapshot(other.state_dict()) == snapshot(model.state_dict())


@pytest.mark.parametrize("lost", ["model", "driver"])
def test_a_lost_state_is_noticed_by_the_round_trip(lost):
    model, driver = trained_to(4, ema_rate=0.3)
    other, resumed = trained_to(4, ema_rate=0.3, seed=9)
    if lost == "driver":
        other.load_state_dict(model.state_dict())
    else:
        resumed.load_state_dict(driver.state_dict())
    for k in range(4, 6):
        train_step(model, driver, k)
        train_step(other, resumed, k)
    assert snapshot(other.state_dict()) != snapshot(model.state_dict())


def test_the_state_is_plain_tensors_that_later_steps_leave_alone(tmp_path):
    model, driver = trained_to(6)
    state = driver.state_dict()
    before = snapshot(state)
    train_step(model, driver, 6)
    train_step(model, driver, 7)
    assert snapshot(state) == before
    torch.save(driver.state_dict(), tmp_path / "state.pt")
    assert snapshot(torch.load(tmp_path / "state.pt", weights_only=True)) == snapshot(driver.state_dict())


def test_the_state_of_another_model_is_refused_by_name():
    _, driver = attached()
    _, smaller = attached(n_layer=2)
    with pytest.raises(UserError, match=r"belongs to another model: .*transformer\.h\.2\.ln_1\.statistics\.count"):
        driver.load_state_dict(smaller.state_dict())


def test_a_copy_goes_its_own_way():
    model, driver = trained_to(4)
    training_loss(model, driver, tokens())
    copied = copy.deepcopy(model)
    other = taper_of(copied)
    state, before = snapshot(driver.state_dict()), logits(model, tokens())
    assert other is not driver
    for k in range(4, LAST + 1):
        train_step(copied, other, k)
    assert len(other.removed) == 10
    assert snapshot(driver.state_dict()) == state
    assert torch.equal(logits(model, tokens()), before)


def test_an_optimizer_without_a_norms_parameter_is_noticed():
    model, driver = attached()
    driver.check(torch.optim.SGD(model.parameters(), lr=1.0))
    rest = [p for name, p in model.named_parameters() if name != "transformer.h.1.ln_2.bias"]
    with pytest.raises(UserError, match=r"does not train transformer\.h\.1\.ln_2\.bias"):
        driver.check(torch.optim.SGD(rest, lr=1.0))


# Compilation


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_step_is_compiled_anew_at_removals_alone():
    schedule = FakeSchedule(mlp_start=2, mlp_gap=2, qk_start=6, qk_gap=2, v_start=10, v_gap=2, final=14)
    options = {"dtype": torch.float32, "schedule": schedule, "n_layer": 2}
    (model, driver), (eager, eager_driver) = attached(**options), attached(**options)
    counter = CompileCounter()
    compiled = torch.compile(training_loss, backend=counter, fullgraph=True, dynamic=False)
    for k in range(17):
        losses = []
        for step, m, d in ((compiled, model, driver), (training_loss, eager, eager_driver)):
            d.set_step(k)
            with d.observe():
                loss = step(m, d, tokens(4, 8, seed=k))
                loss.backward()
            m.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert counter.frame_count == 1 + 7
    assert driver.constants == pytest.approx(eager_driver.constants, rel=1e-5)


def test_the_sizes_of_these_models_cannot_be_confused():
    model = gpt2()
    assert len({model.config.n_embd, CONTEXT, model.config.n_inner, 29, 7, 6}) == 6
