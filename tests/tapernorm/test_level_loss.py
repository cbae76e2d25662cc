"""The loss that levels token scales at every tapered norm, and the constants that it holds them to."""

import copy

import builders
import numpy as np
import pytest
import reference
import torch
from builders import NORMS, array, close, inputs_of, normal, observe, snapshot, tokens

from tapernorm.level_loss import level_loss
from tapernorm.norms import LayerNorm
from tapernorm.scale_loss import ScaleProbe
from tapernorm.taper import forget_taper, taper_of
from tapernorm.util.errors import UserError

WEIGHT = 0.3


def logs_of(model, driver, batch):
    """log s of every token at every tapered norm, from the reference, (N, B, T)."""
    seen = inputs_of(model, driver.swapped, batch)
    norms = {name: model.get_submodule(name) for name in driver.swapped}
    scale = {name: reference.sigma if isinstance(norm, LayerNorm) else reference.rms for name, norm in norms.items()}
    return np.log(np.stack([scale[name](seen[name], norms[name].eps).squeeze() for name in driver.swapped]))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("final", [False, True])
def test_before_the_calibration_it_is_the_variance_of_log_scales_summed_over_tapered_norms(norm, final):
    model, driver = builders.attached(level_weight=WEIGHT, final=final, model_options={"norm": norm})
    batch = tokens()
    logs = logs_of(model, driver, batch)
    model(batch)
    expected = WEIGHT * logs.var(axis=(1, 2)).sum()
    assert driver.anchor_loss().item() == pytest.approx(expected, rel=1e-12)
    assert len(logs) == len(driver.swapped)
    assert abs(WEIGHT * logs.var(axis=(1, 2)).mean() / expected - 1) > 0.5  # a mean over norms is another loss
    assert abs(WEIGHT * np.exp(logs).var(axis=(1, 2)).sum() / expected - 1) > 0.01  # and so is one without the log


@pytest.mark.parametrize("norm", NORMS)
def test_past_the_calibration_it_holds_the_scales_to_1_over_c_beside_the_anchor(norm):
    options = {"norm": norm}
    model, driver = builders.calibrated(0.37, level_weight=WEIGHT, anchor_weight=0.7, model_options=options)
    batch = tokens(seed=9)
    logs = logs_of(model, driver, batch)
    log_c = np.log(list(driver.constants.values()))[:, None, None]
    model(batch)
    final = model.get_submodule("model.norm")
    s = ScaleProbe.on(final).scale(final)
    anchor = 0.7 * (s - driver.scale_target).square().mean().item()
    levels = WEIGHT * ((logs + log_c) ** 2).mean(axis=(1, 2)).sum()
    assert driver.anchor_loss().item() == pytest.approx(anchor + levels, rel=1e-12)
    assert abs(WEIGHT * logs.var(axis=(1, 2)).sum() / levels - 1) > 0.01  # the batch's own level would be another


def test_the_level_of_the_batch_has_no_gradient():
    logs = normal(3, 5, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(level_loss(logs, logs.detach().mean()), logs)
    h = array(logs)
    assert close(gradient, 2 * (h - h.mean()) / h.size)


def test_c_is_the_reciprocal_geometric_mean_of_what_was_observed_as_a_running_mean():
    model, driver = builders.attached(level_weight=WEIGHT, ema_rate=0.25)
    batches = [tokens(seed=seed) for seed in (5, 6, 7)]
    logs = [logs_of(model, driver, batch).mean(axis=(1, 2)) for batch in batches]
    for batch in batches:
        with driver.observe(), torch.no_grad():
            for part in batch.split(2):  # micro-batches of one step
                model(part)
                driver.anchor_loss()
    driver.calibrate()
    weights = 0.25 * 0.75 ** np.arange(2, -1, -1)
    expected = np.exp(-(weights @ np.stack(logs)) / weights.sum())
    assert close(np.array(list(driver.constants.values())), expected)
    plain, other = builders.attached(ema_rate=0.25)
    for batch in batches:
        observe(plain, other, batch)
    other.calibrate()
    assert not close(np.array(list(other.constants.values())), expected, 1e-3)  # least squares is another constant


def test_descent_takes_an_outlier_down_where_the_norms_hide_it_from_the_cross_entropy():
    """An embedding of 100 times the others: with norms, the output forgets its scale and the loss does not."""
    model, driver = builders.attached(level_weight=1.0)
    embedding = model.model.embed_tokens.weight
    with torch.no_grad():
        embedding[3] *= 100
    batch = torch.tensor([[3, 1, 2, 4, 5, 6]])
    optimizer = torch.optim.SGD([embedding], lr=2.0)

    def spread():
        logs = logs_of(model, driver, batch)[0, :]
        return logs.max() - np.median(logs)

    before = spread()
    for _ in range(60):
        with driver.observe():
            model(batch)
            driver.anchor_loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert spread() < 0.7 * before


def test_without_a_weight_nothing_of_it_exists():
    model, driver = builders.attached()
    names = [name for name, _ in model.named_modules() if "probe" in name]
    assert names == ["model.norm.probe", "model.norm.probe.anchor", "model.norm.probe.anchor.running"]
    assert not any(key.startswith("levels") for key in driver.state_dict())
    model(tokens())
    assert driver.anchor_loss().item() == 0


def test_its_state_goes_on_where_it_was():
    model, driver = builders.attached(level_weight=WEIGHT)
    observe(model, driver, tokens())
    again, other = builders.attached(level_weight=WEIGHT)
    other.load_state_dict(driver.state_dict())
    for m, d in ((model, driver), (again, other)):
        observe(m, d, tokens(seed=8))
        d.calibrate()
    assert driver.constants == other.constants
    _, third = builders.attached()
    with pytest.raises(UserError, match="levels"):
        third.load_state_dict(driver.state_dict())


def test_a_copy_of_the_model_has_levels_of_its_own_and_a_forgotten_taper_leaves_none():
    model, driver = builders.attached(level_weight=WEIGHT)
    observe(model, driver, tokens())
    twin = copy.deepcopy(model)
    before = snapshot(driver.state_dict())
    observe(twin, taper_of(twin), tokens(seed=8))
    assert snapshot(driver.state_dict()) == before
    assert snapshot(taper_of(twin).state_dict()) != before
    forget_taper(model)
    assert not any("probe" in name for name, _ in model.named_modules())


def test_a_calibration_without_an_observed_pass_is_refused():
    _, driver = builders.attached(level_weight=WEIGHT)
    with pytest.raises(UserError, match=r"Taper\.observe\(\)"):
        driver.calibrate()
    assert not driver.calibrated
