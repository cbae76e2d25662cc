"""The measurement of Prop. 4.1: zero with a final norm, what NumPy finds without one, and no trace on the model."""

import builders
import numpy as np
import pytest
import reference
import torch
from builders import NORMS, array, snapshot, tokens

from tapernorm.scale_loss import ScaleProbe
from tapernorm.util.rng import generator
from tapernorm_lab.config.gpt2 import Gpt2Shape
from tapernorm_lab.experiments.radial_gradient import radial_share
from tapernorm_lab.models.dyt_derf import replace_norms
from tapernorm_lab.models.gpt2 import fresh

TARGETS = tokens(seed=6)


def hidden(model, batch):
    seen = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(batch)
    hook.remove()
    return array(seen[0])


def reference_share(model, h, g):
    """By central differences of the float64 reference along and across h."""
    W = array(model.lm_head.weight).T
    ids = TARGETS.numpy()

    def loss(moved):
        return reference.cross_entropies(builders.reference_norm(model.model.norm, moved, g) @ W, ids)

    step, gradient = 1e-6, np.empty_like(h)
    for i in range(h.shape[-1]):
        direction = np.zeros(h.shape[-1])
        direction[i] = step
        gradient[..., i] = (loss(h + direction) - loss(h - direction)) / (2 * step)
    along = np.abs(np.sum(gradient * h, -1))
    return np.mean(along / (np.linalg.norm(gradient, axis=-1) * np.linalg.norm(h, axis=-1)))


@pytest.mark.parametrize("norm", NORMS)
def test_a_final_norm_leaves_no_radial_gradient_but_for_eps(norm):
    model, _ = builders.calibrated(final=False, model_options={"norm": norm, "norm_eps": 1e-9})
    assert radial_share(model, tokens(), TARGETS) < 1e-8


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("final", [False, True])
def test_the_share_is_that_of_the_reference(norm, final):
    model, _ = builders.calibrated(final=final, model_options={"norm": norm, "norm_eps": 0.3})
    expected = reference_share(model, hidden(model, tokens()), 0.0 if final else 1.0)
    assert radial_share(model, tokens(), TARGETS) == pytest.approx(expected, rel=1e-6)
    assert expected > 1e-3  # eps is large here, so that a share of zero would be wrong for either


def test_without_a_final_norm_the_share_is_far_from_zero():
    model, _ = builders.calibrated(final=True, model_options={"norm_eps": 1e-9})
    assert radial_share(model, tokens(), TARGETS) > 0.05


def test_the_model_and_its_mode_are_left_as_they_were():
    model, taper = builders.calibrated(final=True)
    probe = ScaleProbe.on(model.model.norm)
    model.train()
    before, hooks = snapshot(model.state_dict()), len(model.model.norm._forward_pre_hooks)
    radial_share(model, tokens(), TARGETS)
    assert model.training
    assert len(model.model.norm._forward_pre_hooks) == hooks
    assert ScaleProbe.on(model.model.norm) is probe
    assert taper.gate.item() == 0
    assert snapshot(model.state_dict()) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_float32_model_is_measured_in_float64():
    model, _ = builders.calibrated(final=False, dtype=torch.float32, model_options={"norm_eps": 1e-9})
    assert radial_share(model, tokens(), TARGETS) < 1e-8  # float32 alone would leave about 1e-7


def test_gpt2s_dropout_is_off_while_it_is_measured():
    shape = Gpt2Shape(d_model=12, n_layer=2, n_head=3, dropout=0.5, norm_eps=1e-9)
    model = fresh(shape, vocab_size=builders.VOCABULARY, context=11, generator=generator(3, "tests"))
    builders.randomise(model, seed=3)
    model.transformer.ln_f = torch.nn.Identity()  # with a final norm the share would be zero either way
    shares = {radial_share(model.train(), tokens(), TARGETS) for _ in range(2)}
    assert len(shares) == 1
    assert shares == {radial_share(model.eval(), tokens(), TARGETS)}
    assert shares.pop() > 0.01


def test_tokens_whose_gradient_vanishes_count_as_zero_and_are_no_nan():
    model = builders.decoder()
    replace_norms(model, "dyt", alpha=0.5, attention_alpha=0.5)
    builders.randomise(model, 4)
    whole = radial_share(model, tokens(), TARGETS)
    assert whole > 1e-3
    with torch.no_grad():
        model.model.norm.alpha.fill_(1e6)
    assert radial_share(model, tokens(), TARGETS) == 0.0
