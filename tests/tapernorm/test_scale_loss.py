"""The scale loss and what it is for: propositions 4.1-4.3 as numbers."""

import pickle

import builders
import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from builders import NORMS, array, close, normal, observe, snapshot, tokens

from tapernorm.norms import LayerNorm
from tapernorm.scale_loss import ScaleProbe

WEIGHT = 0.3


def hidden(model, batch):
    """The pre-logit residual stream, a leaf."""
    h = builders.inputs_of(model, ["model.norm"], batch)["model.norm"]
    return torch.tensor(h, dtype=next(model.parameters()).dtype, requires_grad=True)


def head(model, h):
    return model.lm_head(model.model.norm(h))


def inner(gradient, h):
    """<grad_h, h> of every position, (B, T)."""
    return (gradient * h).sum(-1).detach()


def cross_entropy(z, targets):
    return F.cross_entropy(z.flatten(0, 1), targets.flatten(), reduction="sum")


def some_smooth_loss(z, _):
    return (z @ normal(builders.VOCABULARY, 5, seed=7)).sin().sum() + (z**2 * normal(builders.VOCABULARY, seed=8)).sum()


def layer_norm(model):
    return isinstance(model.model.norm, LayerNorm)


def scale_of(model, h, eps):
    return (reference.sigma if layer_norm(model) else reference.rms)(array(h), eps)


def radial(gradient, h, model):
    """Component along the vector whose length is the scale: h, or h centred."""
    along = h - h.mean(-1, keepdim=True) if layer_norm(model) else h
    return inner(gradient, along)


# 4.1: with a final norm the gradient is orthogonal to the stream


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("loss", [cross_entropy, some_smooth_loss])
def test_with_a_final_norm_the_gradient_has_no_radial_part_whatever_the_loss(norm, loss):
    model, _ = builders.calibrated(0.0, model_options={"norm": norm})  # Internal-Taper: the final norm stays
    h, targets = hidden(model, tokens()), tokens(seed=6)
    for eps, orthogonal in [(0.0, True), (0.5, False)]:  # the claim is for eps = 0, and needs it
        model.model.norm.eps = eps
        (gradient,) = torch.autograd.grad(loss(head(model, h), targets), h)
        size = gradient.norm(dim=-1) * h.norm(dim=-1)
        cosine = (inner(gradient, h) / size).abs().max()
        assert (cosine < 1e-12) == orthogonal


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("loss", [cross_entropy, some_smooth_loss])
def test_without_it_the_gradient_has_a_radial_part(norm, loss):
    model, _ = builders.calibrated(0.0, final=True, model_options={"norm": norm})
    h = hidden(model, tokens())
    (gradient,) = torch.autograd.grad(loss(head(model, h), tokens(seed=6)), h)
    cosine = inner(gradient, h) / (gradient.norm(dim=-1) * h.norm(dim=-1))
    assert cosine.abs().max() > 1e-2


# 4.2: without one, cross-entropy pushes correct tokens outward


def radial_pull(model, h, targets, constant):
    """<grad_h CE, h>, the bound -(1 - p_y) m and the margin m of every position."""
    z = head(model, h)
    (gradient,) = torch.autograd.grad(cross_entropy(z, targets), h)
    probability = np.exp(-reference.cross_entropies(array(z), targets.numpy()))
    free = array(z) - array(constant)
    mine = np.take_along_axis(free, targets.numpy()[..., None], -1)[..., 0]
    others = free.copy()
    np.put_along_axis(others, targets.numpy()[..., None], -np.inf, -1)
    margin = mine - others.max(-1)
    return array(inner(gradient, h)), -(1 - probability) * margin, margin


def constant_part(model):
    """beta W: the logits of a stream that the linear norm sends to its bias alone."""
    return head(model, torch.zeros(model.config.d_model, dtype=torch.float64))


def softened(model):
    """A head whose probabilities stay away from 0 and 1, so that no bound is met by rounding."""
    with torch.no_grad():
        model.lm_head.weight.mul_(0.05)
    return model


@pytest.mark.parametrize("norm", NORMS)
def test_without_a_final_norm_correct_tokens_are_pushed_outward_at_least_as_the_bound_says(norm):
    model, _ = builders.calibrated(0.0, final=True, model_options={"norm": norm})
    h = hidden(softened(model), tokens())
    correct = (head(model, h) - constant_part(model)).argmax(-1)
    pull, bound, margin = radial_pull(model, h, correct, constant_part(model))
    assert (margin > 0).all()
    assert (bound < 0).all()
    assert (pull <= bound * (1 - 1e-12)).all()
    assert not (pull <= 3 * bound).all()  # the bound is of the pull's size, not an empty one


@pytest.mark.parametrize("norm", NORMS)
def test_a_wrong_token_or_a_final_norm_breaks_the_bound(norm):
    model, driver = builders.calibrated(0.0, final=True, model_options={"norm": norm})
    h = hidden(softened(model), tokens())
    free = head(model, h) - constant_part(model)
    pull, _, margin = radial_pull(model, h, free.argmin(-1), constant_part(model))
    assert (margin < 0).all()
    assert (pull > 0).all()
    driver.set_gate(1.0)
    model.model.norm.eps = 0.0
    pull, bound, margin = radial_pull(model, h, head(model, h).argmax(-1), torch.zeros(1))
    assert (margin > 0).all()
    assert (pull > bound).all()


# 4.3: the scale loss restores


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_the_scale_loss_pulls_along_the_stream_towards_its_target(norm, eps):
    model, driver = builders.calibrated(0.0, final=True, anchor_weight=WEIGHT, model_options={"norm": norm})
    model.model.norm.eps = eps
    h = hidden(model, tokens())
    scale = scale_of(model, h, eps)[..., 0]
    target = np.median(scale) + 1e-3
    gradient = anchor_gradient(model, driver, h, target)
    pull = array(radial(gradient, h, model))
    assert close(pull, 2 * WEIGHT * (scale - target) / scale.size * (scale**2 - eps) / scale)
    assert (np.sign(pull) == np.sign(scale - target)).all()
    assert 0 < (pull > 0).sum() < pull.size  # both signs occur
    without_eps = 2 * WEIGHT * (scale - target) / scale.size * scale
    assert close(pull / without_eps, np.ones(pull.shape), 1e-2) == (eps < 0.1)


# The loss


def anchor_gradient(model, driver, h, target):
    driver.scale_target.fill_(target)
    model.model.norm(h)
    (gradient,) = torch.autograd.grad(driver.anchor_loss(), h)
    return gradient


@pytest.mark.parametrize("norm", NORMS)
def test_value_and_gradient_are_those_of_the_reference(norm):
    model, driver = builders.calibrated(0.37, anchor_weight=WEIGHT, model_options={"norm": norm})
    h = hidden(model, tokens())
    settings = {"weight": WEIGHT, "eps": 1e-5, "layer_norm": layer_norm(model)}
    gradient = anchor_gradient(model, driver, h, 1.7)
    assert driver.anchor_loss().item() == pytest.approx(reference.anchor_loss(array(h), 1.7, **settings), rel=1e-12)
    assert close(gradient, reference.anchor_gradient(array(h), 1.7, **settings))
    settings["layer_norm"] = not settings["layer_norm"]
    assert not close(gradient, reference.anchor_gradient(array(h), 1.7, **settings), 1e-3)


def test_the_target_itself_gets_no_gradient_and_no_feedback():
    model, driver = builders.calibrated(0.37, anchor_weight=WEIGHT)
    before = driver.scale_target.clone()
    model(tokens(seed=8))
    driver.anchor_loss().backward()
    assert not driver.scale_target.requires_grad
    assert torch.equal(driver.scale_target, before)


def test_the_loss_sleeps_before_the_taper_starts_and_wakes_at_its_first_step():
    model, driver = builders.attached(anchor_weight=WEIGHT)
    for k in range(builders.SCHEDULE.start + 1):
        driver.set_step(k)
        with driver.observe():
            model(tokens(seed=k))
            loss = driver.anchor_loss()
        active = k >= builders.SCHEDULE.start
        assert (loss.item() != 0.0) == active
        assert loss.requires_grad == active


# The target


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("split", [[6], [1, 2, 3]], ids=str)
def test_the_target_is_the_corrected_running_mean_of_the_batch_mean_scale_frozen_at_the_start(norm, split):
    model, driver = builders.attached(model_options={"norm": norm})
    means = []
    for k in range(builders.SCHEDULE.start):
        driver.set_step(k)
        assert driver.scale_target.isnan()
        batch = tokens(6, 7, seed=k)
        with driver.observe():
            for rows in batch.split(split):
                model(rows)
                driver.anchor_loss()
        means.append(np.mean(scale_of(model, hidden(model, batch), 1e-5)))
    driver.set_step(builders.SCHEDULE.start)
    assert driver.scale_target.item() == pytest.approx(reference.corrected_ema(means, 0.1), rel=1e-12)
    assert driver.scale_target.item() != pytest.approx(means[-1], rel=1e-6)
    frozen = snapshot(driver.state_dict())
    observe(model, driver, tokens(seed=9))
    assert {k: v for k, v in snapshot(driver.state_dict()).items() if k != "gate"} == {
        k: v for k, v in frozen.items() if k != "gate"
    }


# The probe


def test_the_probe_holds_the_input_of_the_final_norm_in_float32():
    model, _ = builders.attached()
    probe = ScaleProbe.on(model.model.norm)
    with pytest.raises(RuntimeError, match="no forward pass yet"):
        probe.scale(model.model.norm)
    expected = scale_of(model, hidden(model, tokens()), 1e-5)
    assert close(probe.scale(model.model.norm), expected)
    model.bfloat16()(tokens())
    assert probe.hidden.dtype == torch.bfloat16
    assert probe.scale(model.model.norm).dtype == torch.float32


def test_a_copy_of_the_final_norm_takes_no_model_along():
    """As the measurement of its gradient makes one: a GPT-2 more in memory would be the price."""
    model, driver = builders.attached(level_weight=0.2)
    builders.observe(model, driver, tokens())
    size = len(pickle.dumps(model.model.norm))
    wide, driver = builders.attached(level_weight=0.2, model_options={"vocab_size": 5000})
    assert len(pickle.dumps(wide.model.norm)) == size
    assert len(pickle.dumps(wide)) > 4 * len(pickle.dumps(model))
