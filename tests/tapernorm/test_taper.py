"""The driver of a taper: attach, schedule, calibration moment, copies and dtypes, state, compilation."""

import copy
import math
import shutil

import builders
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from builders import NORMS, SCHEDULE, array, close, observe, reference_norm, snapshot, tokens
from torch._dynamo.testing import CompileCounter

from tapernorm.models.decoder import Decoder
from tapernorm.norms import Form, TaperNorm
from tapernorm.schedule import GateSchedule, gate_at
from tapernorm.taper import attach, taper_of
from tapernorm.util.errors import UserError
from tapernorm_lab.training.norm_driver import TaperDriver
from tapernorm_lab.training.training_loss import training_loss

INTERNAL = (
    "model.layers.0.input_layernorm",
    "model.layers.0.post_attention_layernorm",
    "model.layers.1.input_layernorm",
    "model.layers.1.post_attention_layernorm",
)
OPTIONS = {"schedule": SCHEDULE, "ema_rate": 0.1}


def tapered_norms(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, TaperNorm)}


def loss_and_gradients(model, batch):
    model.zero_grad()
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()
    return logits.detach(), loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# Attach


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("final", [False, True])
def test_attaching_leaves_logits_loss_and_gradients_bitwise_unchanged(norm, dtype, final):
    plain = builders.decoder(norm=norm, dtype=dtype)
    model = copy.deepcopy(plain)
    driver = attach(model, final=final, **OPTIONS)
    expected = loss_and_gradients(plain, tokens())
    with driver.observe():
        actual = loss_and_gradients(model, tokens())
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert actual[2].keys() == expected[2].keys()  # gamma_t has none
    assert all(torch.equal(actual[2][name], gradient) for name, gradient in expected[2].items())


def test_the_mixing_form_changes_bits_that_attaching_does_not():
    model, driver = builders.calibrated(0.999999, dtype=torch.float32)
    mixed = loss_and_gradients(model, tokens())
    driver.set_gate(1.0)
    assert not torch.equal(mixed[0], loss_and_gradients(model, tokens())[0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, INTERNAL),
        ({"final": True}, (*INTERNAL, "model.norm")),
        ({"sites": ["*.post_attention_layernorm"]}, INTERNAL[1::2]),
        ({"sites": ["model.layers.1.*"], "final": True}, (*INTERNAL[2:], "model.norm")),
        ({"sites": ["*.0.input*", "*.1.post*"]}, (INTERNAL[0], INTERNAL[3])),
        ({"sites": [], "final": True}, ("model.norm",)),
    ],
)
def test_sites_and_final_choose_the_norms_in_running_order(options, expected):
    model, driver = builders.attached(**options)
    assert driver.swapped == expected
    assert tuple(tapered_norms(model)) == expected
    with pytest.raises(UserError, match="after 0 updates"):
        driver.calibrate()
    observe(model, driver, tokens())
    driver.calibrate()
    driver.set_gate(0.0)
    chosen = {model.get_submodule(name) for name in expected}
    standard = [m for m in model.modules() if type(m) is torch.nn.RMSNorm]
    assert len(standard) + len(chosen) == 5


def test_attaching_twice_is_refused_and_the_first_taper_stays():
    model, driver = builders.attached()
    with pytest.raises(UserError, match="attached already"):
        attach(model, final=True)
    assert taper_of(model) is driver
    assert len(tapered_norms(model)) == 4


def test_an_optimizer_built_before_attach_is_refused_and_names_the_parameter():
    model = builders.decoder()
    early = torch.optim.AdamW(model.parameters())
    driver = attach(model, **OPTIONS)
    with pytest.raises(UserError, match=r"does not train model.layers.0.input_layernorm.gamma_t: build it after"):
        driver.check(early)
    driver.check(torch.optim.AdamW(model.parameters()))
    for norm in tapered_norms(model).values():
        norm.gamma_t.requires_grad_(False)
    driver.check(early)  # frozen on purpose


# Detach


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("final", [False, True])
def test_detaching_gives_the_plain_model_back_with_what_it_has_learnt(norm, final):
    model, driver = builders.attached(final=final, model_options={"norm": norm})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with driver.observe():
        (model(tokens()).square().mean() + driver.anchor_loss()).backward()
    optimizer.step()
    logits = model(tokens())
    state = {key: value for key, value in model.state_dict().items() if key.rsplit(".", 1)[-1] not in ("gamma_t", "c")}
    driver.detach()
    plain = builders.decoder(norm=norm)
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    assert model.__dict__.keys() == plain.__dict__.keys()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert snapshot(model.state_dict()) == snapshot(state)
    assert torch.equal(model(tokens()), logits)
    assert not torch.equal(plain(tokens()), logits)  # it has learnt
    with pytest.raises(UserError, match="carries no taper"):
        taper_of(model)
    assert attach(model, final=final).swapped


def test_only_at_gate_one_is_a_plain_model_the_same_function():
    model, driver = builders.calibrated(0.37)
    for g in (0.37, 0.0):
        driver.set_gate(g)
        with pytest.raises(UserError, match=rf"the gate is {g:g}, .*Taper\.set_gate\(1\) .* fold\(model\)"):
            driver.detach()
    driver.set_step(SCHEDULE.start)  # exactly 1, and mixing
    with pytest.raises(UserError, match=r"the gate is 1, .*Taper\.set_gate\(1\)"):
        driver.detach()
    assert len(tapered_norms(model)) == 4
    driver.set_gate(1.0)
    driver.detach()


def test_a_detached_taper_refuses_to_drive():
    _, driver = builders.attached()
    driver.detach()
    for call in (
        driver.detach,
        driver.calibrate,
        driver.anchor_loss,
        driver.observe().__enter__,
        lambda: driver.set_gate(1.0),
        lambda: driver.set_step(0),
    ):
        with pytest.raises(UserError, match=r"detached .*attach\(model\)"):
            call()


# Schedule and calibration


def train_step(model, driver, k):
    driver.set_step(k)
    with driver.observe():
        model(tokens(seed=k))
        driver.anchor_loss()


def test_set_step_follows_the_schedule_and_calibrates_at_its_start():
    model, driver = builders.attached()
    for k in range(SCHEDULE.end + 2):
        train_step(model, driver, k)
        assert driver.gate.item() == pytest.approx(gate_at(k, SCHEDULE), abs=1e-7)
        assert driver.calibrated == (k >= SCHEDULE.start)
        expected = Form.OBSERVE if k < SCHEDULE.start else Form.MIX if k < SCHEDULE.end else Form.LINEAR
        assert {norm.gate.form for norm in tapered_norms(model).values()} == {expected}


@pytest.mark.parametrize("late", [SCHEDULE.start, SCHEDULE.start + 2, SCHEDULE.end, SCHEDULE.end + 50])
def test_calibration_happens_at_the_first_step_at_or_after_the_start_however_late(late):
    model, driver = builders.attached()
    train_step(model, driver, 0)
    driver.set_step(late)
    assert driver.calibrated
    assert all(math.isfinite(c) for c in driver.constants.values())
    assert driver.gate.item() == pytest.approx(gate_at(late, SCHEDULE), abs=1e-7)


def test_calibration_happens_once():
    model, driver = builders.attached()
    for k in range(SCHEDULE.start + 1):
        train_step(model, driver, k)
    constants, norm = driver.constants, model.model.layers[0].input_layernorm
    with torch.no_grad():
        norm.gamma_t.mul_(2)
        norm.weight.mul_(3)
    gain = norm.gamma_t.clone()
    for k in range(SCHEDULE.start + 1, SCHEDULE.end + 1):
        train_step(model, driver, k)
    assert driver.constants == constants
    assert torch.equal(norm.gamma_t, gain)


def test_gamma_trains_before_the_taper_both_gains_inside_and_gamma_t_after():
    model, driver = builders.attached()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norm, trained = model.model.layers[0].input_layernorm, []
    for k in range(SCHEDULE.end + 1):
        driver.set_step(k)
        with driver.observe():
            (model(tokens(seed=k)).square().mean() + driver.anchor_loss()).backward()
        trained.append((norm.weight.grad is not None, norm.gamma_t.grad is not None))
        if k == SCHEDULE.start:
            assert norm.gamma_t not in optimizer.state  # its optimizer state starts at zero
        optimizer.step()
        optimizer.zero_grad()
    inside = SCHEDULE.end - SCHEDULE.start
    assert trained == [(True, False)] * SCHEDULE.start + [(True, True)] * inside + [(False, True)]
    assert optimizer.state[norm.gamma_t]["step"] == inside + 1


def test_steps_need_a_schedule():
    model = builders.decoder()
    with pytest.raises(UserError, match=r"set_step needs a schedule: attach\(model, schedule="):
        attach(model).set_step(0)


@pytest.mark.parametrize("g", [0.5, 0.0])
def test_a_gate_below_one_needs_calibrated_norms(g):
    model, driver = builders.attached()
    with pytest.raises(UserError, match="needs calibrated norms"):
        driver.set_gate(g)
    assert driver.gate.item() == 1.0
    driver.set_gate(1.0)
    observe(model, driver, tokens())
    driver.calibrate()
    driver.set_gate(g)


@pytest.mark.parametrize("norm", NORMS)
def test_autocast_mixes_float32_streams(norm):
    model, driver = builders.calibrated(0.37, dtype=torch.float32, final=True, model_options={"norm": norm})
    for g in builders.GATES:
        driver.set_gate(g)
        exact = model(tokens())
        with torch.autocast("cpu", torch.bfloat16):
            narrow = model(tokens())
        assert close(narrow, exact, 0.1)  # eight bits per product, some twenty products deep
        assert not torch.equal(narrow.float(), exact)


# Copies, moves, files


def moved_to(dtype):
    return lambda model: model.to(dtype)


def loaded(model):
    fresh = Decoder(model.config).to(next(model.parameters()).dtype)
    driver = attach(fresh, final=True, **OPTIONS)
    fresh.load_state_dict(model.state_dict())
    driver.load_state_dict(taper_of(model).state_dict())
    return fresh


MOVES = {
    "to float32": moved_to(torch.float32),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "device and dtype": lambda model: model.to("cpu", torch.float64),
    "deepcopy": copy.deepcopy,
    "deepcopy of bfloat16": lambda model: copy.deepcopy(model.bfloat16()),
    "bfloat16 of deepcopy": lambda model: copy.deepcopy(model).bfloat16(),
    "load": loaded,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("norm", NORMS)
def test_the_gate_reaches_every_norm_after_a_move(move, norm):
    model, _ = builders.calibrated(0.37, dtype=torch.float32, final=True, model_options={"norm": norm})
    moved = move(model)
    driver = taper_of(moved)
    norms = tapered_norms(moved)
    assert len(norms) == 5
    for g, form in [(0.37, Form.MIX), (0.0, Form.LINEAR), (0.61, Form.MIX), (1.0, Form.OBSERVE)]:
        driver.set_gate(g)
        for norm in norms.values():
            assert norm.gate.form is form
            assert norm.gate.value.item() == pytest.approx(g, abs=1e-7)
            h = builders.normal(3, 12, dtype=norm.weight.dtype)
            rounding = 8 * torch.finfo(h.dtype).eps
            assert close(norm(h), reference_norm(norm, array(h)), rounding)


@pytest.mark.parametrize("move", ["deepcopy", "deepcopy of bfloat16", "load"])
def test_the_gate_of_a_copy_leaves_the_original_alone(move):
    model, driver = builders.calibrated(0.37, final=True)
    copied = MOVES[move](model)
    before, state = model(tokens()), snapshot(driver.state_dict())
    taper_of(copied).set_gate(0.0)
    taper_of(copied).scale_target.fill_(7.0)
    assert taper_of(copied) is not driver
    assert torch.equal(model(tokens()), before)
    assert snapshot(driver.state_dict()) == state
    copied(tokens())
    driver.set_gate(1.0)
    assert taper_of(copied).gate.item() == 0.0


def test_a_model_is_copied_right_after_a_training_pass():
    model, driver = builders.calibrated(0.37)
    model(tokens())
    copied = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="no forward pass yet"):
        taper_of(copied).anchor_loss()
    copied(tokens())
    assert torch.equal(taper_of(copied).anchor_loss(), driver.anchor_loss())


def test_bfloat16_spares_gate_constants_statistics_and_target():
    model, driver = builders.calibrated(0.37, dtype=torch.float32)
    kept = snapshot(driver.state_dict()), driver.constants
    model.bfloat16()
    assert model.model.layers[0].input_layernorm.gamma_t.dtype == torch.bfloat16
    assert (snapshot(driver.state_dict()), driver.constants) == kept
    assert not torch.equal(driver.gate.bfloat16().float(), driver.gate)  # the rounding that would have happened
    driver.set_gate(0.123456)
    assert driver.gate.item() == pytest.approx(0.123456, abs=1e-8)


# State


def test_the_state_round_trips_and_training_goes_on_where_it_was():
    for stop in (1, SCHEDULE.start, SCHEDULE.start + 2, SCHEDULE.end + 1):
        model, driver = builders.attached(anchor_weight=0.1, final=True)
        for k in range(stop):
            train_step(model, driver, k)
        other, resumed = builders.attached(anchor_weight=0.1, final=True, model_options={"seed": 9})
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(driver.state_dict())
        assert snapshot(resumed.state_dict()) == snapshot(driver.state_dict())
        for k in range(stop, SCHEDULE.end + 2):
            train_step(model, driver, k)
            train_step(other, resumed, k)
        assert snapshot(resumed.state_dict()) == snapshot(driver.state_dict())
        assert snapshot(other.state_dict()) == snapshot(model.state_dict())
        assert torch.equal(other(tokens()), model(tokens()))


def test_a_lost_state_is_noticed_by_the_round_trip():
    model, driver = builders.attached()
    for k in range(2):
        train_step(model, driver, k)
    other, resumed = builders.attached()
    for k in range(2, SCHEDULE.start + 1):
        train_step(model, driver, k)
        train_step(other, resumed, k)
    assert snapshot(resumed.state_dict()) != snapshot(driver.state_dict())


def test_the_state_is_plain_tensors_that_later_steps_leave_alone(tmp_path):
    model, driver = builders.attached()
    state = driver.state_dict()
    before = snapshot(state)
    train_step(model, driver, 0)
    assert snapshot(state) == before
    torch.save(driver.state_dict(), tmp_path / "state.pt")
    again = torch.load(tmp_path / "state.pt", weights_only=True)
    assert snapshot(again) == snapshot(driver.state_dict())


def test_the_state_of_other_norms_is_refused_by_name():
    _, internal = builders.attached()
    _, everything = builders.attached(final=True)
    with pytest.raises(UserError, match=r"belongs to another model: .*model.norm.statistics.count"):
        internal.load_state_dict(everything.state_dict())


def test_a_state_with_a_tensor_of_another_shape_is_refused_by_name_and_changes_nothing():
    """A scalar would be broadcast over a buffer without a word."""
    model, driver = builders.attached()
    builders.observe(model, driver, builders.tokens())
    before = snapshot(driver.state_dict())
    _, other = builders.attached()
    for value in (torch.zeros(()), torch.zeros(3), 0.5):
        state = {**other.state_dict(), "anchor.running.ema": value}
        with pytest.raises(UserError, match=r"anchor\.running\.ema is (\(\d?,?\)|a float), .*\(1,\)"):
            driver.load_state_dict(state)
        assert snapshot(driver.state_dict()) == before


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_anchor_loss_changes_nothing_and_is_the_same_however_often_it_is_asked(calibrated):
    model, driver = builders.attached(anchor_weight=0.3, level_weight=0.2)
    if calibrated:
        builders.observe(model, driver, tokens())
        driver.calibrate()
    with driver.observe():
        model(tokens(seed=5))
        held = {name: buffer.clone() for name, buffer in model.named_buffers()}  # sums of this step among them
        losses = {driver.anchor_loss().item() for _ in range(3)}
        assert all(torch.equal(b, held[n]) or b.isnan().all() for n, b in model.named_buffers())
    assert len(losses) == 1
    assert losses.pop() > 0


def test_a_pass_is_observed_whether_its_anchor_loss_is_asked_for_or_not():
    states = []
    for times in (0, 1, 3):
        model, driver = builders.attached(anchor_weight=0.3, level_weight=0.2)
        with driver.observe():
            model(tokens())
            for _ in range(times):
                driver.anchor_loss()
        states.append(snapshot(driver.state_dict()))
    assert states[0] == states[1] == states[2]
    assert float(driver.state_dict()["anchor.running.updates"]) == 1


# Compilation


def run_compiled(compiled, model, driver, steps):
    losses = []
    driver = TaperDriver(driver)
    for k in steps:
        driver.set_step(k)
        with driver.observe():
            both = tokens(4, 8, seed=k)
            ce, aux, _ = compiled(model, driver, both[:, :-1], both[:, 1:])
            (ce + aux).backward()
        losses.append(ce.item() + aux.item())
        model.zero_grad()
    return losses


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("final", "level"), [(False, 0.0), (True, 0.0), (True, 0.2)])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_whole_taper_compiles_three_graphs_without_a_break(norm, final, level):
    options = {"anchor_weight": 0.1, "final": final, "dtype": torch.float32, "model_options": {"norm": norm}}
    options["level_weight"] = level
    schedule = GateSchedule(start=3, end=12)
    (eager, eager_driver), (model, driver) = (builders.attached(**{**options, "schedule": schedule}) for _ in range(2))
    counter = CompileCounter()
    compiled = torch.compile(training_loss, backend=counter, fullgraph=True, dynamic=False)
    losses = run_compiled(compiled, model, driver, range(15))
    assert counter.frame_count == 3  # observe, mix, linear: two recompilations
    assert losses == pytest.approx(run_compiled(training_loss, eager, eager_driver, range(15)), rel=1e-6)
    assert driver.constants == pytest.approx(eager_driver.constants, rel=1e-6)
    assert close(driver.scale_target, eager_driver.scale_target, 1e-6)


@pytest.mark.usefixtures("fresh_dynamo")
def test_evaluations_between_the_steps_cost_the_training_step_no_graph():
    model, driver = builders.attached(anchor_weight=0.1, dtype=torch.float32)
    counter = CompileCounter()
    compiled = torch.compile(training_loss, backend=counter, fullgraph=True, dynamic=False)
    for k in range(SCHEDULE.end + 2):
        run_compiled(compiled, model, driver, [k])
        model.eval()
        with torch.no_grad():
            model(tokens(2, 5, seed=k))
        model.train()
    assert counter.frame_count == 3


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_gate_that_is_a_python_number_compiles_once_per_step():
    def loss(model, g, windows):
        return model(windows).square().mean() * g

    model, counter = builders.decoder(dtype=torch.float32), CompileCounter()
    compiled = torch.compile(loss, backend=counter, fullgraph=True, dynamic=False)
    for k in range(SCHEDULE.start, SCHEDULE.start + 4):
        compiled(model, gate_at(k, SCHEDULE), tokens())
    assert counter.frame_count > 3


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_trains_like_eager():
    schedule, runs = GateSchedule(start=1, end=3), []
    for compiled in (torch.compile(training_loss, fullgraph=True, dynamic=False), training_loss):
        options = {"dtype": torch.float32, "model_options": {"n_layer": 1}, "final": True, "anchor_weight": 0.1}
        model, driver = builders.attached(**{**options, "schedule": schedule})
        losses = run_compiled(compiled, model, driver, range(4))
        runs.append((losses, driver.constants, driver.scale_target.item()))
    (losses, constants, target), (eager_losses, eager_constants, eager_target) = runs
    assert losses == pytest.approx(eager_losses, rel=1e-5)
    assert constants == pytest.approx(eager_constants, rel=1e-5)
    assert target == pytest.approx(eager_target, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({"schedule": GateSchedule(500, 900)}, 0.1),
        ({"schedule": GateSchedule(5_000, 9_000)}, 0.01),
        ({"schedule": GateSchedule(3, 9)}, 0.5),
        ({"schedule": GateSchedule(500, 900), "ema_rate": 0.3}, 0.3),
        ({}, 0.01),
    ],
)
def test_the_rate_of_the_means_follows_from_the_schedule_unless_it_is_given(options, rate):
    """s_tgt after batches x_1, x_2 is (m (1 - m) x_1 + m x_2) / (1 - (1 - m)^2), of models that attach alike."""
    batches = [tokens(seed=5), tokens(seed=6)]
    model, driver = builders.attached(**{"schedule": None, "ema_rate": None, **options})
    seen = []
    for batch in batches:
        observe(model, driver, batch)
        s = builders.inputs_of(model, ("model.norm",), batch)["model.norm"]
        seen.append(np.sqrt((s**2).mean(-1) + model.get_submodule("model.norm").eps).mean())
    driver.calibrate()
    expected = (rate * (1 - rate) * seen[0] + rate * seen[1]) / (1 - (1 - rate) ** 2)
    assert driver.scale_target.item() == pytest.approx(expected, rel=1e-12)
    wrong = rate / 2
    assert expected != pytest.approx((wrong * (1 - wrong) * seen[0] + wrong * seen[1]) / (1 - (1 - wrong) ** 2), 1e-9)
