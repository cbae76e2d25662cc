"""The tapered norms against F.rms_norm, F.layer_norm and the NumPy reference."""

import copy

import pytest
import reference
import torch
import torch.nn.functional as F
from builders import GATES, KINDS, array, close, normal, plain_norm, reference_norm, tapered_norm, uniform
from torch.fx.experimental.proxy_tensor import make_fx

from tapernorm.norms import (
    Form,
    Gate,
    LayerNorm,
    RMSNorm,
    TaperLayerNorm,
    TaperRMSNorm,
    is_norm,
    kind_of,
    norm_scale,
    taper,
)
from tapernorm.util.errors import UserError

SHAPES = ((7,), (3, 5), (2, 3, 11), (2, 1, 3, 13))
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
STATISTICS = ("mean", "rsqrt", "sqrt", "var", "std", "pow", "norm", "sum", "square")


def functional(norm, h):
    if isinstance(norm, LayerNorm):
        return F.layer_norm(h, h.shape[-1:], norm.weight, norm.bias, norm.eps)
    return F.rms_norm(h, h.shape[-1:], norm.weight, norm.eps)


def gradients(norm, h, apply, upstream):
    """Output and gradients of (h, gamma, beta), as a flat list."""
    h = h.clone().requires_grad_()
    wanted = [h, norm.weight, *([norm.bias] if getattr(norm, "bias", None) is not None else [])]
    y = apply(norm, h)
    return [y, *torch.autograd.grad(y, wanted, upstream)]


def mixed_by_hand(norm, h):
    """g * standard + (1 - g) * linear, both always computed."""
    g = norm.gate.value.to(h.dtype)
    return g * functional(norm, h) + (1 - g) * norm.linear(h)


# Values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("g", GATES)
def test_agrees_with_the_reference(kind, shape, g):
    norm, h = tapered_norm(kind, shape[-1], g), normal(*shape)
    assert close(norm(h), reference_norm(norm, array(h)))
    assert not close(norm(h), reference_norm(norm, array(h), 0.9 * g + 0.05), 1e-3)  # of another gate


@pytest.mark.parametrize("kind", KINDS)
def test_norm_scale_is_what_the_norm_divides_by(kind):
    norm, h = plain_norm(kind, 11), normal(3, 11)
    expected = (reference.rms if kind == "rmsnorm" else reference.sigma)(array(h), norm.eps)
    assert close(norm_scale(norm, h), expected)
    other = (reference.sigma if kind == "rmsnorm" else reference.rms)(array(h), norm.eps)
    assert not close(norm_scale(norm, h), other, 1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observing", [False, True])
def test_gate_one_is_bitwise_the_standard_norm_outputs_and_gradients(kind, dtype, observing):
    norm, h, upstream = tapered_norm(kind, 96, 1.0, dtype=dtype), normal(5, 96, dtype=dtype), normal(5, 96, seed=9)
    norm.gate.observing = observing
    ours = gradients(norm, h, lambda n, x: n(x), upstream.to(dtype))
    theirs = gradients(norm, h, functional, upstream.to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_written_out_by_hand_is_not_bitwise_the_standard_norm(dtype):
    norm, h = tapered_norm("rmsnorm", 96, 1.0, dtype=dtype), normal(5, 96, dtype=dtype)
    by_hand = h / norm_scale(norm, h) * norm.weight
    assert not torch.equal(norm(h), by_hand)
    assert close(norm(h), by_hand, 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mixing_form_at_gate_one_still_equals_the_standard_norm(kind):
    norm, h, upstream = tapered_norm(kind, 11, 1.0), normal(3, 11), normal(3, 11, seed=9)
    standard = gradients(norm, h, functional, upstream)
    norm.gate.set(1.0, Form.MIX)
    assert all(close(a, b) for a, b in zip(gradients(norm, h, lambda n, x: n(x), upstream), standard, strict=True))
    norm(h).sum().backward()
    assert torch.equal(norm.gamma_t.grad, torch.zeros(11, dtype=torch.float64))  # it has a gradient, of zero


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("g", GATES)
def test_bfloat16_is_as_near_to_float64_as_its_rounding_allows(kind, g):
    narrow = tapered_norm(kind, 64, g, dtype=torch.bfloat16)
    h = normal(9, 64).bfloat16()
    expected = reference_norm(narrow, array(h))  # from the parameters as rounded
    assert close(narrow(h), expected, 4 * 2**-8)  # a bfloat16 step is 2^-8; gain, scale and sum round in turn
    assert not close(narrow(h), 1.05 * expected, 4 * 2**-8)


def test_bias_none_is_a_zero_bias_at_every_gate():
    h = normal(3, 11)
    for g in GATES:
        without, zero = tapered_norm("layernorm without bias", 11, g), tapered_norm("layernorm", 11, g)
        biased = copy.deepcopy(zero)
        torch.nn.init.zeros_(zero.bias)
        assert close(without(h), zero(h))
        assert not close(without(h), biased(h), 1e-3)


# Gradients


def gradient_check(norm, h, apply):
    names = [n for n, p in norm.named_parameters(recurse=False) if p is not None]
    values = [dict(norm.named_parameters())[n].detach().clone().requires_grad_() for n in names]

    def of(h, *values):
        return apply(norm, dict(zip(names, values, strict=True)), h)

    return torch.autograd.gradcheck(of, (h.requires_grad_(), *values), raise_exception=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("g", GATES)
@pytest.mark.parametrize("shape", [(5,), (2, 3, 7)])
def test_gradients_agree_with_finite_differences(kind, g, shape):
    norm = tapered_norm(kind, shape[-1], g)
    assert gradient_check(norm, normal(*shape), torch.func.functional_call)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("g", [0.37, 1.0])
def test_finite_differences_notice_a_statistic_cut_off_the_graph(kind, g):
    def detached(norm, parameters, h):
        scale = norm_scale(norm, h)
        return torch.func.functional_call(norm, parameters, h) * scale / scale.detach()

    assert not gradient_check(tapered_norm(kind, 5, g), normal(2, 5), detached)


# The dead branch


def finite(norm, h, apply):
    h = h.clone().requires_grad_()
    norm.zero_grad()
    y = apply(norm, h)
    y.sum().backward()
    grads = [h.grad, *(p.grad for p in norm.parameters(recurse=False) if p.grad is not None)]
    return all(bool(t.isfinite().all()) for t in (y, *grads))


def poison_linear(norm, value):
    with torch.no_grad():
        norm.gamma_t.fill_(value)
        norm.c.fill_(value)


def poison_standard(norm, value):
    with torch.no_grad():
        norm.weight.fill_(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(("g", "poison"), [(1.0, poison_linear), (0.0, poison_standard)])
def test_a_dead_branch_that_is_not_finite_leaks_nowhere(kind, value, g, poison):
    norm, h = tapered_norm(kind, 7, g), normal(3, 7)
    clean = norm(h).detach()
    poison(norm, value)
    assert torch.equal(norm(h), clean)
    assert finite(norm, h, lambda n, x: n(x))
    assert not finite(norm, h, mixed_by_hand)


@pytest.mark.parametrize("kind", KINDS)
def test_a_standard_branch_that_divides_zero_by_zero_does_not_reach_gate_zero(kind):
    norm, h = tapered_norm(kind, 7, 0.0, eps=0.0), torch.zeros(2, 7, dtype=torch.float64)
    assert finite(norm, h, lambda n, x: n(x))
    assert not finite(norm, h, mixed_by_hand)


# The traced graph


def operations(module, *inputs):
    """Names of the ATen operations of a forward pass, `aten.mean.dim` as `mean`."""
    with torch.no_grad():
        graph = make_fx(module)(*inputs).graph
    return [str(n.target).removeprefix("aten.").split(".")[0] for n in graph.nodes if n.op == "call_function"]


def statistics(names):
    return [name for name in names if any(word in name for word in STATISTICS)]


def test_the_graph_of_a_linear_rms_norm_holds_no_statistic():
    norm = tapered_norm("rmsnorm", 7, 0.0)
    assert set(operations(norm, normal(3, 7))) == {"mul"}
    for form in (Form.OBSERVE, Form.MIX):
        norm.gate.set(1.0, form)
        assert statistics(operations(norm, normal(3, 7)))


@pytest.mark.parametrize("kind", ["layernorm", "layernorm without bias"])
def test_the_graph_of_a_linear_layer_norm_holds_one_mean_and_no_variance(kind):
    norm = tapered_norm(kind, 7, 0.0)
    assert statistics(operations(norm, normal(3, 7))) == ["mean"]
    norm.gate.set(0.37)
    assert statistics(operations(norm, normal(3, 7))) != ["mean"]


# Axes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("g", GATES)
def test_permuting_features_with_gains_permutes_the_output_and_nothing_else(kind, g):
    norm, h, order = tapered_norm(kind, 7, g), normal(3, 5, 7), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    permuted = copy.deepcopy(norm)
    with torch.no_grad():
        for parameter in permuted.parameters(recurse=False):
            parameter.copy_(parameter[order])
    assert close(permuted(h[..., order]), norm(h)[..., order])
    assert not close(norm(h[..., order]), norm(h)[..., order], 1e-3)  # the gains left behind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("g", GATES)
def test_one_hot_position_changes_no_other_position_and_no_channel(kind, g):
    norm, h = tapered_norm(kind, 7, g), normal(2, 5, 7)
    hot = h.clone()
    hot[:, 0] *= 1e3
    assert torch.equal(norm(hot)[:, 1:], norm(h)[:, 1:])
    assert close(norm(hot), reference_norm(norm, array(hot)))
    along_time = norm(hot.transpose(1, 2)[..., [0, 1, 2, 3, 4, 0, 1]])[..., :5].transpose(1, 2)  # the wrong axis
    assert not close(along_time, norm(hot), 1e-3)


# The gate and the class


@pytest.mark.parametrize(("g", "form"), [(1.0, Form.OBSERVE), (1, Form.OBSERVE), (0.37, Form.MIX), (0, Form.LINEAR)])
def test_the_form_follows_from_the_gate(g, form):
    gate = Gate()
    gate.set(g)
    assert gate.form is form
    assert gate.value.item() == pytest.approx(g)


@pytest.mark.parametrize(("kind", "tapered"), [("rmsnorm", TaperRMSNorm), ("layernorm", TaperLayerNorm)])
def test_tapering_keeps_the_module_its_parameters_and_its_hooks(kind, tapered):
    norm, calls = plain_norm(kind, 7), []
    norm.register_forward_hook(lambda *_: calls.append(1))
    before = dict(norm.named_parameters())
    made = taper(norm, Gate(), ema_rate=0.1)
    assert made is norm
    assert type(norm) is tapered
    assert all(dict(norm.named_parameters())[name] is value for name, value in before.items())
    assert torch.equal(norm.gamma_t, norm.weight)
    assert norm.gamma_t.data_ptr() != norm.weight.data_ptr()
    norm(normal(3, 7))
    assert calls == [1]


def replaced():
    """A kernel from the hub, or a device map's hooks: the class that is swapped would not be asked."""
    norm = plain_norm("rmsnorm", 7)
    norm.forward = lambda h: h
    return norm


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.GroupNorm(1, 7), "cannot taper a GroupNorm; known norms: RMSNorm, LayerNorm"),
        (lambda: RMSNorm(7, elementwise_affine=False), "weight"),
        (lambda: LayerNorm((3, 7)), "last axis"),
        (lambda: type("Mine", (RMSNorm,), {})(7), "cannot taper a Mine"),
        (lambda: tapered_norm("rmsnorm", 7, 1.0), "cannot taper a TaperRMSNorm"),
        (replaced, "device_map"),
    ],
)
def test_a_norm_that_cannot_be_tapered_is_refused(make, message):
    norm = make()
    parameters = list(norm._parameters)
    with pytest.raises(UserError, match=message):
        taper(norm, Gate(), ema_rate=0.1)
    assert list(norm._parameters) == parameters


def test_what_is_no_norm_has_no_kind():
    assert not is_norm(torch.nn.Linear(2, 2))
    assert is_norm(plain_norm("layernorm", 7))
    assert is_norm(tapered_norm("rmsnorm", 7, 1.0))
    with pytest.raises(UserError, match="Linear is not a known norm; known norms: RMSNorm, LayerNorm, Llama"):
        kind_of(torch.nn.Linear(2, 2))


# The norms of transformers


@pytest.mark.parametrize("kind", KINDS)
def test_copying_gamma_at_the_taper_start_starts_the_linear_gain_there(kind):
    norm = tapered_norm(kind, 7, 1.0)
    norm.gate.observing = True
    norm(normal(3, 7))
    norm.statistics.update()
    with torch.no_grad():
        norm.weight.copy_(uniform(7, seed=40))  # gamma has trained since attach
    norm.calibrate(norm.best_c())
    assert torch.equal(norm.gamma_t, norm.weight)
