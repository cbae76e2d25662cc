"""The temperature control: exp(<x, w>/D) x, the Baseline at w = 0, blind to the scale of h, saved, decoded."""

import builders
import numpy as np
import pytest
import torch
from builders import NORMS, array, close, decoder, normal, snapshot, tokens

from tapernorm.checkpoints.store import load, save
from tapernorm.folding import fold
from tapernorm.models.decode import decode_step, prefill
from tapernorm.models.decoder import Decoder
from tapernorm.models.kv_cache import KVCache
from tapernorm.models.packed_decoder import PackedDecoder
from tapernorm.norms import is_norm
from tapernorm.taper import attach
from tapernorm.util.errors import UserError
from tapernorm_lab.experiments.radial_gradient import radial_share
from tapernorm_lab.models.logit_temperature import Tempered, temper

every_norm = pytest.mark.parametrize("norm", NORMS)


def tempered(*, dtype=torch.float64, **options) -> Decoder:
    model = decoder(dtype=dtype, **options)
    norm = temper(model.model.norm)
    with torch.no_grad():
        norm.temperature.copy_(2.4 * normal(12, seed=9))
    return model


def by_hand(norm, h):
    x = builders.reference_norm(norm, h)
    return x * np.exp(np.sum(x * array(norm.temperature), axis=-1, keepdims=True) / 12)


@every_norm
def test_agrees_with_the_formula(norm):
    module, h = tempered(norm=norm).model.norm, 3 * normal(2, 5, 12)
    assert close(module(h), by_hand(module, array(h)))
    untempered = builders.reference_norm(module, array(h))
    assert not close(module(h), untempered, 1e-2)
    wrong = untempered * np.exp(np.mean(array(h) * array(module.temperature), axis=-1, keepdims=True))
    assert not close(module(h), wrong, 1e-2)  # read off the stream, it would see its scale
    throttled = untempered * np.exp(np.sum(untempered * array(module.temperature), axis=-1, keepdims=True))
    assert not close(module(h), throttled, 1e-2)  # by a sum, it would move with the width


def test_a_step_of_one_size_moves_it_alike_at_every_width():
    """Adam moves each entry of w by about the learning rate: of the wide and the narrow scale the same then comes."""
    moved = []
    for width in (12, 48):
        norm = temper(torch.nn.RMSNorm(width).double())
        h = torch.ones(1, width, dtype=torch.float64)
        with torch.no_grad():
            norm.temperature.fill_(0.3)
        moved.append((norm(h) / h).mean().item())
    assert moved[0] == pytest.approx(moved[1], rel=1e-9)
    assert moved[0] == pytest.approx(np.exp(0.3), rel=1e-9)


@every_norm
def test_at_the_start_the_model_is_bitwise_the_baseline(norm):
    model = decoder(norm=norm, dtype=torch.float32)
    expected = model(tokens())
    temper(model.model.norm)
    assert torch.equal(model(tokens()), expected)
    model(tokens()).square().sum().backward()
    assert model.model.norm.temperature.grad.abs().min() > 0  # but it learns from the first step on


@every_norm
def test_it_cannot_see_the_scale_of_the_stream(norm):
    """Prop. 4.1 holds on, unlike where the final norm is tapered."""
    model = tempered(norm=norm, norm_eps=1e-12)
    inputs, targets = tokens()[:, :-1], tokens()[:, 1:]
    assert radial_share(model, inputs, targets) < 1e-9
    final_only, _ = builders.calibrated(0.0, model_options={"norm": norm, "norm_eps": 1e-12}, final=True, sites=())
    assert radial_share(final_only, inputs, targets) > 1e-2


def test_its_logits_are_the_baselines_times_a_number_per_token():
    model = tempered()
    plain = decoder()
    ratio = model(tokens()) / plain(tokens())  # (B, T, V)
    assert close(ratio, ratio[..., :1].expand_as(ratio), 1e-9)
    assert ratio[..., 0].std() > 0.05


@every_norm
def test_a_saved_model_comes_back_bitwise(tmp_path, norm):
    model = tempered(dtype=torch.float32, norm=norm, tie_head=True)
    save(model, tmp_path)
    again = load(tmp_path, Decoder)
    assert isinstance(again.model.norm, Tempered)
    assert snapshot(again.state_dict()) == snapshot(model.state_dict())
    assert torch.equal(again(tokens()), model(tokens()))


def test_cached_decoding_gives_the_logits_of_the_whole_text():
    model = tempered().requires_grad_(False)
    packed = PackedDecoder(model)
    cache = KVCache.allocate(model.config, batch=4, capacity=7, dtype=torch.float64, device=torch.device("cpu"))
    found = [prefill(packed, tokens()[:, :3], cache)]
    found += [decode_step(packed, tokens()[:, t], cache, t) for t in range(3, 7)]
    assert close(torch.stack(found, dim=1), model(tokens())[:, 2:])


def test_it_goes_with_a_taper_of_the_internal_norms(tmp_path):
    model = tempered()
    driver = attach(model, ema_rate=0.1)
    builders.observe(model, driver, tokens())
    driver.calibrate()
    driver.set_gate(0.0)
    folded, report = fold(model)
    assert close(folded(tokens()), model(tokens()))
    assert len(report.norms) == 4
    save(model.float(), tmp_path)
    assert torch.equal(load(tmp_path)(tokens()), model(tokens()))


def test_a_tempered_norm_is_a_norm_and_none_to_taper():
    model = tempered()
    assert is_norm(model.model.norm)
    with pytest.raises(UserError, match="cannot taper a TemperedRMSNorm"):
        attach(model, final=True)
    with pytest.raises(UserError, match="this one is a TemperedRMSNorm"):
        temper(model.model.norm)
