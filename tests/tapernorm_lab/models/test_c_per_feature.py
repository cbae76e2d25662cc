"""A constant per feature: least squares of each by itself; folded to 1e-12; mixed, resumed, saved and undone."""

import builders
import numpy as np
import pytest
import reference
import torch
from builders import NORMS, SCHEDULE, array, close, decoder, normal, snapshot, tokens, uniform

from tapernorm.checkpoints.store import load, save
from tapernorm.folding import fold
from tapernorm.norms import TaperNorm
from tapernorm.taper import attach
from tapernorm.util.errors import UserError
from tapernorm_lab.models.c_per_feature import FeaturewiseNorm, make_featurewise

every_norm = pytest.mark.parametrize("norm", NORMS)
WIDTH = 12


def featurewise(g=1.0, *, calibrate=True, dtype=torch.float64, norm="rmsnorm", **options):
    """A decoder with a taper whose norms have a c per feature, gamma_t and c moved away from their start."""
    model = decoder(dtype=dtype, norm=norm)
    taper = attach(model, ema_rate=0.1, schedule=SCHEDULE, **options)
    norms = [make_featurewise(model.get_submodule(name)) for name in taper.swapped]
    if calibrate:
        builders.observe(model, taper, tokens())
        taper.calibrate()
        with torch.no_grad():
            for i, each in enumerate(norms):
                each.gamma_t.copy_(uniform(WIDTH, seed=20 + i))
                each.c.mul_(uniform(WIDTH, seed=40 + i))
        taper.set_gate(g)
    return model, taper


def lopsided(*shape, seed=7):
    """Tokens of different scales whose features have different scales too, so that no two c are alike."""
    h = normal(*shape, seed=seed) * uniform(*shape[:-1], 1, seed=seed + 1) ** 3 * torch.linspace(0.2, 3, shape[-1])
    h[..., 1] *= h.square().mean(-1)  # and one that grows with its token's scale
    return h


def calibrated_norm(norm, batches, *, rate=0.3):
    model = decoder(norm=norm)
    taper = attach(model, ema_rate=rate)
    tested = make_featurewise(model.model.layers[0].input_layernorm)
    for h in batches:
        with taper.observe():
            tested(h)
    tested.calibrate(tested.best_c())
    return tested


def parts(norm, kind, h):
    """(v, s) of the reference, tokens flat: what is scaled, and what the norm divides it by."""
    flat = array(h).reshape(-1, h.shape[-1])
    if kind == "layernorm":
        return reference.centre(flat), reference.sigma(flat, norm.eps)
    return flat, reference.rms(flat, norm.eps)


@every_norm
def test_each_feature_has_its_own_least_squares(norm):
    h = lopsided(3, 5, WIDTH)
    tested = calibrated_norm(norm, [h])
    v, s = parts(tested, norm, h)
    gamma = array(tested.weight)

    def residual(c):
        return np.mean((v / s * gamma - c * v * gamma) ** 2, axis=0)  # (D,)

    c = array(tested.c)
    expected = [np.linalg.lstsq(v[:, [j]], v[:, j] / s[:, 0], rcond=None)[0][0] for j in range(WIDTH)]
    assert close(tested.c, np.array(expected))
    for step in (-1e-3, 1e-3):
        assert (residual(c + step) > residual(c)).all()
    scalar = np.divide(*reference.calibration_means(array(h), gamma, tested.eps, layer_norm=norm == "layernorm"))
    assert residual(c).sum() < 0.99 * residual(scalar).sum()
    assert not close(tested.c, np.full(WIDTH, scalar), 1e-2)  # statistics on another axis or pooled would give one


@every_norm
def test_the_papers_scalar_is_their_mean_weighted_by_energy(norm):
    h = lopsided(3, 5, WIDTH)
    tested = calibrated_norm(norm, [h])
    v, _ = parts(tested, norm, h)
    gamma = array(tested.weight)
    weights = gamma**2 * np.mean(v**2, axis=0)
    scalar = np.divide(*reference.calibration_means(array(h), gamma, tested.eps, layer_norm=norm == "layernorm"))
    assert close(np.sum(weights * array(tested.c)) / np.sum(weights), scalar)
    assert not close(np.mean(array(tested.c)), scalar, 1e-3)


@every_norm
def test_the_means_are_bias_corrected_over_steps_of_unequal_batches(norm):
    batches = [lopsided(n, 5, WIDTH, seed=50 + 3 * n) for n in (2, 3, 1)]
    tested = calibrated_norm(norm, batches)
    means = []
    for h in batches:
        v, s = parts(tested, norm, h)
        means.append(np.concatenate([np.mean(v**2 / s, axis=0), np.mean(v**2, axis=0)]))
    numerator, denominator = np.split(reference.corrected_ema(means, 0.3), 2)
    assert close(tested.c, numerator / denominator)
    assert not close(tested.c, np.split(means[-1], 2)[0] / np.split(means[-1], 2)[1], 1e-3)


def test_a_feature_that_is_always_zero_takes_the_scale_of_all():
    h = lopsided(3, 5, WIDTH)
    h[..., 4] = 0
    tested = calibrated_norm("rmsnorm", [h])
    v, s = parts(tested, "rmsnorm", h)
    assert tested.c[4].item() == pytest.approx(np.sum(v**2 / s) / np.sum(v**2), rel=1e-12)
    assert tested.c.isfinite().all()


def test_without_statistics_it_says_so():
    model, taper = featurewise(calibrate=False)
    with pytest.raises(UserError, match=r"cannot calibrate after 0 updates of its statistics \(12 of 12 features"):
        taper.calibrate()
    with pytest.raises(UserError, match=r"a gate of 0\.0 needs calibrated norms"):
        taper.set_gate(0.0)
    taper._gate.set(0.0)
    with pytest.raises(UserError, match="is not calibrated"):
        fold(model)


def test_at_gate_one_it_is_bitwise_the_plain_model():
    expected = decoder(dtype=torch.float32)(tokens())
    model, _ = featurewise(dtype=torch.float32, calibrate=False)
    assert torch.equal(model(tokens()), expected)


@every_norm
@pytest.mark.parametrize("fused", [True, False])
def test_it_folds_to_the_last_digits(norm, fused):
    model, taper = featurewise(0.0, norm=norm, final=True)
    expected = model(tokens())
    folded, report = fold(model, fused=fused)
    assert close(folded(tokens()), expected)
    assert [entry.c for entry in report.norms] == list(taper.constants.values())
    assert [entry.c for entry in report.norms] == [
        pytest.approx(model.get_submodule(name).c.mean().item()) for name in taper.swapped
    ]
    with torch.no_grad():  # negative control: the mean of c in its place
        for name in taper.swapped:
            c = model.get_submodule(name).c
            c.fill_(c.mean())
    assert not close(folded(tokens()), model(tokens()), 1e-3)


@every_norm
def test_between_the_gates_it_mixes_as_written(norm):
    model, taper = featurewise(0.37, norm=norm)
    tested, h = model.model.layers[1].input_layernorm, normal(3, WIDTH)
    g, gamma, gamma_t, c = taper.gate.item(), array(tested.weight), array(tested.gamma_t), array(tested.c)
    v, s = parts(tested, norm, h)
    beta = array(tested.bias) if norm == "layernorm" else 0.0
    assert close(tested(h), g * v / s * gamma + (1 - g) * c * v * gamma_t + beta)


def test_it_is_saved_and_comes_back(tmp_path):
    model, taper = featurewise(0.0, dtype=torch.float32, final=True)
    save(model, tmp_path)
    again = load(tmp_path)
    assert snapshot(again.state_dict()) == snapshot(model.state_dict())
    assert torch.equal(again(tokens()), model(tokens()))
    kinds = [isinstance(module, FeaturewiseNorm) for module in again.modules() if isinstance(module, TaperNorm)]
    assert kinds == [True] * len(taper.swapped)
    assert torch.equal(fold(again)[0](tokens()), fold(model)[0](tokens()))


def test_a_taper_resumes_from_its_state():
    model, taper = featurewise(calibrate=False)
    builders.observe(model, taper, tokens())
    other, resumed = featurewise(calibrate=False)
    resumed.load_state_dict(taper.state_dict())
    for driver in (taper, resumed):
        driver.calibrate()
    assert torch.equal(model.model.layers[0].input_layernorm.c, other.model.layers[0].input_layernorm.c)
    _, scalar = builders.attached()
    with pytest.raises((UserError, RuntimeError)):
        scalar.load_state_dict(taper.state_dict())


def test_detached_it_is_the_plain_model_again():
    model, taper = featurewise(calibrate=False)
    taper.detach()
    plain = decoder()
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert torch.equal(model(tokens()), plain(tokens()))
