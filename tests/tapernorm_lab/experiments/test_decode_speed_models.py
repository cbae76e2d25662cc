"""What stands in each arm of the decoding benchmark, and that it computes what its name says."""

import builders
import pytest
import torch
import torch.nn.functional as F
import transformers
from builders import close, tokens
from torch import nn

from tapernorm.models.decoder import RMSNorm, RotaryTable
from tapernorm.models.packed_linear import PackedLinear
from tapernorm.norms import FixedScale
from tapernorm.taper import forget_taper
from tapernorm.util.errors import UserError
from tapernorm_lab.experiments.speed.decode_speed_models import ARMS, NaiveRMSNorm, make_arms
from tapernorm_lab.models.dyt_derf import REPLACEMENTS
from tapernorm_lab.report.frames import decoding as decode_rows


def gated(g=0.0, **options):
    model, driver = builders.calibrated(g, dtype=torch.float32, **options)
    return model.requires_grad_(False), driver


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_naive_norm_is_the_one_of_transformers(dtype):
    gamma, h = builders.uniform(12, dtype=dtype), builders.normal(3, 5, 12, dtype=dtype)
    theirs = transformers.models.llama.modeling_llama.LlamaRMSNorm(12, eps=1e-3).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(gamma)
    found = NaiveRMSNorm(gamma, 1e-3)(h)
    assert found.dtype == dtype
    assert torch.equal(found, theirs(h))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    assert close(found, F.rms_norm(h, (12,), gamma, 1e-3), tolerance)
    assert not close(found, F.rms_norm(h, (12,), gamma, 1e-1), tolerance)


def kinds(model):
    """Classes of the modules of an arm that are neither linear maps, embedding, rotary table nor containers."""
    leaves = [type(module) for module in model.modules() if not list(module.children())]
    return sorted(kind.__name__ for kind in leaves if kind not in (PackedLinear, nn.Embedding, RotaryTable))


@pytest.mark.parametrize("final", [False, True], ids=["internal", "all"])
def test_what_stands_in_the_place_of_the_norms(final):
    arms = make_arms(gated(final=final)[0], torch.float32)
    assert tuple(arms) == ARMS == decode_rows.ARMS
    internal = 4  # two layers
    assert kinds(arms["baseline_naive"]) == ["NaiveRMSNorm"] * 5
    assert kinds(arms["baseline"]) == ["RMSNorm"] * 5
    assert kinds(arms["unfused"]) == ["FixedScale"] * (internal + final) + ["RMSNorm"] * (not final)
    assert kinds(arms["fused"]) == ["RMSNorm"] * (not final)
    assert kinds(arms["identity"]) == []
    assert type(arms["baseline"].norm) is RMSNorm
    assert type(arms["unfused"].blocks[0].mlp_norm) is FixedScale


def test_sites_that_stayed_plain_are_plain_in_the_folded_arms():
    arms = make_arms(gated(sites=["*.input_layernorm"])[0], torch.float32)
    assert kinds(arms["fused"]) == ["RMSNorm"] * 3
    assert kinds(arms["unfused"]) == ["FixedScale"] * 2 + ["RMSNorm"] * 3
    assert kinds(arms["identity"]) == []


@pytest.mark.parametrize("final", [False, True], ids=["internal", "all"])
@pytest.mark.parametrize("tie_head", [False, True])
def test_each_arm_computes_what_its_name_says(final, tie_head):
    model, driver = gated(final=final, model_options={"tie_head": tie_head})
    arms = make_arms(model, torch.float32)
    found = {name: arm(tokens()) for name, arm in arms.items()}
    linear = model(tokens())[:, -1]
    driver.set_gate(1.0)
    standard = model(tokens())[:, -1]
    for norm in [m for m in model.modules() if isinstance(m, RMSNorm)]:
        norm.forward = lambda h: h
    for name, expected in zip(ARMS, (standard, standard, linear, linear, model(tokens())[:, -1]), strict=True):
        assert close(found[name], expected, 2e-5), name
        others = [other for other in (standard, linear) if other is not expected]
        assert not any(close(found[name], other, 1e-2) for other in others)


@pytest.mark.parametrize("tie_head", [False, True])
def test_all_arms_share_one_architecture(tie_head):
    arms = make_arms(gated(final=True, model_options={"tie_head": tie_head})[0], torch.float32)
    for arm in arms.values():
        shapes = {n: p.shape for n, p in arm.named_parameters(remove_duplicate=False) if p.ndim == 2}
        assert shapes == {
            n: p.shape for n, p in arms["baseline"].named_parameters(remove_duplicate=False) if p.ndim == 2
        }
        assert not any(p.requires_grad for p in arm.parameters())
    same = ("baseline_naive", "baseline", "identity")
    weights = [torch.cat([b.qkv.weight.flatten() for b in arms[arm].blocks]) for arm in same]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], torch.cat([b.qkv.weight.flatten() for b in arms["fused"].blocks]))
    assert len({arm.embed.weight.data_ptr() for arm in arms.values()}) == len(arms)  # none is another's warm cache


def test_arms_have_the_dtype_asked_for_and_the_source_stays_as_it_was():
    model, _ = gated()
    before = builders.snapshot(model.state_dict())
    arms = make_arms(model, torch.bfloat16)
    assert {p.dtype for arm in arms.values() for p in arm.parameters()} == {torch.bfloat16}
    assert {arm.rotary.cos.dtype for arm in arms.values()} == {torch.float32}
    assert builders.snapshot(model.state_dict()) == before
    assert model(tokens()).dtype == torch.float32


def test_replacements_join_the_arms_where_they_are_asked_for():
    model, _ = gated(final=True, model_options={"tie_head": True})
    arms = make_arms(model, torch.float32, replacements=True)
    assert tuple(arms) == (*ARMS, *REPLACEMENTS) == (*decode_rows.ARMS, *decode_rows.REPLACEMENT_ARMS)
    assert kinds(arms["dyt"]) == ["DynamicTanh"] * 5 + ["ScaledEmbedding"]
    assert kinds(arms["derf"]) == ["DynamicErf"] * 5 + ["ScaledEmbedding"]
    for kind in REPLACEMENTS:
        assert torch.equal(arms[kind].embed.weight, arms["baseline"].embed.weight)
        assert torch.equal(arms[kind].blocks[1].qkv.weight, arms["baseline"].blocks[1].qkv.weight)
        assert not close(arms[kind](tokens()), arms["baseline"](tokens()), 1e-2)


def test_what_is_no_tapered_rms_norm_model_is_refused():
    with pytest.raises(UserError, match="4 tapered norms and norm 'layernorm': give a tapered run"):
        make_arms(gated(model_options={"norm": "layernorm"})[0], torch.float32)
    with pytest.raises(UserError, match="0 tapered norms and norm 'rmsnorm': give a tapered run"):
        make_arms(builders.decoder(), torch.float32)
    model, driver = gated()
    driver.set_gate(0.37)
    with pytest.raises(UserError, match=r"the gate is 0\.37 and folding needs 0"):
        make_arms(model, torch.float32)


def test_a_model_whose_taper_was_forgotten_still_makes_arms():
    model, _ = gated()
    forget_taper(model)
    assert kinds(make_arms(model, torch.float32)["baseline"]) == ["RMSNorm"] * 5
