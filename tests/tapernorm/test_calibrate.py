"""Calibration of c: least squares, its running means, and when they are fed."""

from functools import partial

import builders
import numpy as np
import pytest
import reference
import torch
from builders import KINDS, array, close, normal, observe, plain_norm, snapshot, tokens
from scipy.optimize import minimize_scalar
from torch.utils.checkpoint import checkpoint

from tapernorm.calibrate import RunningMean
from tapernorm.norms import Gate, taper
from tapernorm.util.errors import UserError
from tapernorm_lab.training.validation_loss import evaluate

SITES = ("model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm", "model.norm")


def scaled_tokens(seed, *shape):
    """Hidden states whose scale differs from token to token, off-centre."""
    return normal(*shape, seed=seed) * (1 + 3 * normal(*shape[:-1], 1, seed=seed + 1).abs()) + 0.5


def running(rate=0.1, size=2, dtype=torch.float64):
    return RunningMean(size, rate, dtype=dtype, device=torch.device("cpu"))


def expected_means(model, batch):
    layer_norm = model.config.norm == "layernorm"
    return {
        name: reference.calibration_means(h, array(model.get_submodule(name).weight), 1e-5, layer_norm=layer_norm)
        for name, h in builders.inputs_of(model, SITES, batch).items()
    }


# Least squares


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [5, 16])
def test_c_minimises_the_gain_weighted_residual(kind, width):
    norm, h = taper(plain_norm(kind, width), Gate(), ema_rate=0.1), scaled_tokens(2, 3, 7, width)
    norm.gate.observing = True
    norm(h)
    norm.statistics.update()
    norm.calibrate(norm.best_c())
    layer_norm = kind != "rmsnorm"
    of_c = partial(reference.residual, h=array(h), gamma=array(norm.weight), eps=norm.eps, layer_norm=layer_norm)
    best = minimize_scalar(of_c, bracket=(0.1, 1.0), tol=1e-12).x
    assert norm.c.item() == pytest.approx(best, rel=1e-7)  # a minimum is located to the square root of the precision
    unweighted = np.mean(1 / reference.rms(reference.centre(array(h)) if layer_norm else array(h), norm.eps))
    assert unweighted != pytest.approx(best, rel=1e-2)
    ones = np.ones(width)
    without_gain = reference.calibration_means(array(h), ones, norm.eps, layer_norm=layer_norm)
    assert without_gain[0] / without_gain[1] != pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_one_hot_position_weighs_as_one_token_and_lands_on_no_channel(kind):
    norm, h = taper(plain_norm(kind, 7), Gate(), ema_rate=0.1), normal(2, 5, 7)
    h[:, 0] *= 100
    norm.gate.observing = True
    norm(h)
    norm.statistics.update()
    means = reference.calibration_means(array(h), array(norm.weight), norm.eps, layer_norm=kind != "rmsnorm")
    assert close(norm.statistics.value(), means)
    assert norm.statistics.ema.shape == (2,)


# Running means


@pytest.mark.parametrize("rate", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("updates", [1, 2, 9])
def test_ema_equals_its_closed_form_over_batches_of_varying_size(rate, updates):
    mean, batches = running(rate), []
    for i in range(updates):
        rows = normal(i + 1, 2, seed=i) + i
        mean.add(rows.sum(0), len(rows))
        mean.update()
        batches.append(array(rows).mean(0))
    assert close(mean.value(), reference.corrected_ema(batches, rate))
    assert mean.updates == updates
    if rate < 1:
        assert not close(mean.ema, reference.corrected_ema(batches, rate), 1e-6)  # without bias correction


def test_a_mean_of_means_over_unequal_parts_would_differ():
    mean, parts = running(), [normal(1, 2), normal(5, 2, seed=1)]
    for part in parts:
        mean.add(part.sum(0), len(part))
    mean.update()
    assert close(mean.value(), torch.cat(parts).mean(0))
    assert not close(mean.value(), torch.stack([p.mean(0) for p in parts]).mean(0), 1e-3)


def test_an_update_without_additions_changes_nothing():
    mean = running()
    mean.add(normal(2), 3)
    mean.update()
    before = snapshot(dict(mean.named_buffers()))
    mean.update()
    assert snapshot(dict(mean.named_buffers())) == before


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1])
def test_an_ema_rate_outside_zero_to_one_is_refused(rate):
    with pytest.raises(ValueError, match=r"EMA rate must lie in \(0, 1\]"):
        running(rate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_statistics_are_kept_in_float32_at_least(dtype):
    assert running(dtype=dtype).ema.dtype == torch.float32
    norm = taper(plain_norm("rmsnorm", 64, dtype=dtype), Gate(), ema_rate=1.0)
    h = scaled_tokens(3, 500, 64).to(dtype)
    norm.gate.observing = True
    norm(h)
    norm.statistics.update()
    means = reference.calibration_means(array(h), array(norm.weight), norm.eps, layer_norm=False)
    assert close(norm.statistics.value(), means, 1e-5)


# One update per optimizer step, in a decoder


def with_checkpointing(model):
    for block in model.model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def one_step(model, driver, micro_batches):
    """How many tokens each norm saw, recomputed ones included."""
    with driver.observe():
        for rows in micro_batches:
            (model(rows).square().mean() + driver.anchor_loss()).backward()
        return {name: model.get_submodule(name).statistics.count.item() for name in driver.swapped}


@pytest.mark.parametrize("norm", builders.NORMS)
@pytest.mark.parametrize("split", [[6], [3, 3], [1, 2, 3], [2, 2, 2]], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_update_per_step_equal_to_the_full_batch(norm, split, checkpointing):
    model, driver = builders.attached(model_options={"norm": norm}, final=True)
    batches = [tokens(6, 7, seed=i) for i in range(3)]
    expected = [expected_means(model, batch) for batch in batches]
    if checkpointing:
        with_checkpointing(model)
    for batch in batches:
        counts = one_step(model, driver, batch.split(split))
    for name in SITES:
        statistics = model.get_submodule(name).statistics
        assert statistics.updates == len(batches)
        assert close(statistics.value(), reference.corrected_ema([e[name] for e in expected], 0.1))
        assert not close(statistics.value(), expected[-1][name], 1e-6)
    recomputed = 2 if checkpointing else 1  # the second forward pass really happened
    assert counts["model.layers.0.input_layernorm"] == recomputed * 6 * 7
    assert counts["model.norm"] == 6 * 7


@pytest.mark.parametrize("norm", builders.NORMS)
def test_calibration_takes_c_from_the_running_means_of_every_norm(norm):
    model, driver = builders.attached(model_options={"norm": norm}, final=True)
    means = expected_means(model, tokens())
    observe(model, driver, tokens())
    driver.calibrate()
    for name in SITES:
        assert driver.constants[name] == pytest.approx(means[name][0] / means[name][1], rel=1e-12)
    assert len({round(c, 6) for c in driver.constants.values()}) == 5  # each norm has its own


# When nothing is collected


def untouched(model, driver):
    buffers = [b for name in driver.swapped for b in model.get_submodule(name).statistics.buffers()]
    anchor = [b for key, b in driver.state_dict().items() if key.startswith("anchor.running")]
    assert len(anchor) == 4
    return all(bool((b == 0).all()) for b in [*buffers, *anchor])


def in_evaluation_mode(model, driver):
    with pytest.raises(UserError, match=r"model\.train\(\)"):
        observe(model.eval(), driver, tokens())


def outside_observe(model, driver):
    model(tokens())
    driver.anchor_loss()


def error_inside_observe(model, driver):
    def step():
        with driver.observe():
            model(tokens())
            driver.anchor_loss()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()


@pytest.mark.parametrize("act", [in_evaluation_mode, outside_observe, error_inside_observe])
def test_nothing_is_collected(act):
    model, driver = builders.attached()
    act(model, driver)
    assert untouched(model, driver)
    observe(model.train(), driver, tokens())  # the same pass, as it should be
    assert not untouched(model, driver)


def test_blocks_in_eval_mode_are_named_and_what_the_others_collected_is_dropped():
    """As a loop has it that switches off the dropout of blocks that it does not train."""
    model, driver = builders.attached()
    model.model.layers[1].eval()
    with pytest.raises(UserError, match=r"model\.layers\.1\.input_layernorm and 1 more, .* model\.train\(\)"):
        observe(model, driver, tokens())
    assert untouched(model, driver)
    for name in ("input_layernorm", "post_attention_layernorm"):  # the remedy: norms have no dropout
        model.get_submodule(f"model.layers.1.{name}").train()
    observe(model, driver, tokens())
    assert not untouched(model, driver)


def test_an_evaluation_inside_is_no_eval_mode_of_the_step():
    model, driver = builders.attached()
    with driver.observe(), torch.no_grad():
        model.eval()(tokens(seed=8))
        model.train()(tokens())
        driver.anchor_loss()
        model.eval()(tokens(seed=9))
    other, alone = builders.attached()
    observe(other, alone, tokens())
    assert snapshot(driver.state_dict()) == snapshot(alone.state_dict())


@pytest.mark.parametrize("g", [1.0, 0.37, 0.0])
def test_nothing_is_collected_after_the_calibration(g):
    model, driver = builders.calibrated(g)
    before = snapshot(driver.state_dict())
    observe(model, driver, tokens(seed=8))
    assert snapshot(driver.state_dict()) == before


def test_an_error_drops_its_own_step_and_leaves_the_steps_before_it():
    model, driver = builders.attached()
    observe(model, driver, tokens())
    before = snapshot(driver.state_dict())
    error_inside_observe(model, driver)
    assert snapshot(driver.state_dict()) == before
    observe(model, driver, tokens(seed=8))
    assert snapshot(driver.state_dict()) != before


@pytest.mark.parametrize("g", [None, 1.0, 0.37, 0.0], ids=str)
@pytest.mark.parametrize("inside_observe", [False, True])
def test_an_evaluation_pass_leaves_the_state_bitwise_unchanged(g, inside_observe):
    if g is None:
        model, driver = builders.attached()
        observe(model, driver, tokens())
    else:
        model, driver = builders.calibrated(g)
    before = snapshot(model.state_dict()), snapshot(driver.state_dict())
    score = partial(evaluate, model, tokens(1, 40)[0], text_bytes=9, context=7, batch=2, device=torch.device("cpu"))
    if inside_observe:
        with driver.observe():
            score()
    else:
        score()
    assert (snapshot(model.state_dict()), snapshot(driver.state_dict())) == before


# Calibration without observation


def test_calibrating_without_observation_is_refused_and_says_what_to_do():
    _, driver = builders.attached()
    with pytest.raises(UserError, match=r"after 0 updates .* train at g = 1 inside Taper.observe\(\)"):
        driver.calibrate()
    assert not driver.calibrated


def test_calibrating_on_a_stream_of_zeros_is_refused():
    model, driver = builders.attached()
    torch.nn.init.zeros_(model.model.embed_tokens.weight)
    observe(model, driver, tokens())
    with pytest.raises(UserError, match=r"after 1 updates .*c\* = nan"):
        driver.calibrate()
