"""The tapered norms against F.rms_norm, F.layer_norm and the NumPy reference (method.md sections 1 and 2)."""

import copy
import importlib

import builders
import pytest
import reference
import torch
import torch.nn.functional as F
from builders import GATES, KINDS, array, close, normal, plain_norm, reference_norm, tapered_norm, uniform
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx

from tapernorm.norms import (
    Form,
    Gate,
    LayerNorm,
    RMSNorm,
    TaperLayerNorm,
    TaperNorm,
    TaperRMSNorm,
    gain_of,
    is_norm,
    kind_of,
    norm_scale,
    taper,
    untaper,
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("g", GATES)
def test_another_gate_in_the_reference_disagrees(kind, g):
    norm, h = tapered_norm(kind, 11, g), normal(3, 11)
    assert not close(norm(h), reference_norm(norm, array(h), 0.9 * g + 0.05), 1e-3)


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
def test_gate_zero_is_the_affine_map_of_its_matrix_and_bias(kind):
    norm, width = tapered_norm(kind, 7, 0.0), 7
    matrix = 0.83 * torch.diag(norm.gamma_t)
    if kind != "rmsnorm":
        matrix = (torch.eye(width, dtype=torch.float64) - 1 / width) @ matrix
    bias = norm.bias if kind == "layernorm" else 0.0
    h = normal(4, width)
    assert close(norm(h), h @ matrix + bias)
    assert not close(norm(h), h @ matrix.T + bias, 1e-3) or kind == "rmsnorm"


@pytest.mark.parametrize("kind", KINDS)
def test_between_zero_and_one_the_output_is_the_convex_mix_of_both_ends(kind):
    norm, h = tapered_norm(kind, 7, 1.0), normal(4, 7)
    standard = norm(h)
    norm.gate.set(0.0)
    linear = norm(h)
    norm.gate.set(0.375)  # exact in float32, as the gate is
    assert close(norm(h), 0.375 * standard + 0.625 * linear)
    assert not close(norm(h), 0.625 * standard + 0.375 * linear, 1e-3)


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


@pytest.mark.parametrize(("kind", "expected"), [("rmsnorm", []), ("layernorm", ["mean"] * 5)])
def test_the_graph_of_a_whole_decoder_without_norms(kind, expected):
    model, driver = builders.calibrated(0.0, final=True, model_options={"norm": kind})
    assert statistics(operations(model, builders.tokens())) == expected  # two blocks of two norms, one final norm
    driver.set_gate(0.37)
    assert len(statistics(operations(model, builders.tokens()))) > len(expected)


def test_the_graph_of_internal_taper_keeps_the_final_norm_alone():
    model, _ = builders.calibrated(0.0)
    final = statistics(operations(model.model.norm, normal(3, 12)))
    assert final
    assert statistics(operations(model, builders.tokens())) == final


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


@pytest.mark.parametrize("g", [-0.01, 1.01, torch.nan])
def test_a_gate_outside_zero_to_one_is_refused(g):
    with pytest.raises(ValueError, match=r"the gate must lie in \[0, 1\]"):
        Gate().set(g)


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


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (torch.nn.GroupNorm(1, 7), "cannot taper a GroupNorm; known norms: RMSNorm, LayerNorm"),
        (RMSNorm(7, elementwise_affine=False), "needs a gain"),
        (LayerNorm((3, 7)), "exactly one axis"),
    ],
)
def test_a_norm_that_cannot_be_tapered_is_refused(norm, message):
    with pytest.raises(UserError, match=message):
        taper(norm, Gate(), ema_rate=0.1)
    assert "gamma_t" not in norm._parameters


def test_a_norm_whose_forward_was_replaced_is_refused():
    """A kernel from the hub, or a device map's hooks: the class that is swapped would not be asked."""
    norm = plain_norm("rmsnorm", 7)
    norm.forward = lambda h: h
    with pytest.raises(
        UserError, match=r"cannot taper RMSNorm\(.*\): something replaced its forward .* load the model"
    ):
        taper(norm, Gate(), ema_rate=0.1)


def test_a_subclass_of_a_known_norm_is_refused():
    norm = type("Mine", (RMSNorm,), {})(7)
    with pytest.raises(UserError, match="cannot taper a Mine"):
        taper(norm, Gate(), ema_rate=0.1)


def test_what_is_no_norm_has_no_kind():
    assert not is_norm(torch.nn.Linear(2, 2))
    assert is_norm(plain_norm("layernorm", 7))
    assert is_norm(tapered_norm("rmsnorm", 7, 1.0))
    with pytest.raises(UserError, match="a Linear is no norm of a known kind; known norms: RMSNorm, LayerNorm, Llama"):
        kind_of(torch.nn.Linear(2, 2))


# The norms of transformers

NORM_CLASSES = {
    "Llama": ("llama.modeling_llama.LlamaRMSNorm", 0),
    "Mistral": ("mistral.modeling_mistral.MistralRMSNorm", 0),
    "Qwen2": ("qwen2.modeling_qwen2.Qwen2RMSNorm", 0),
    "Qwen3": ("qwen3.modeling_qwen3.Qwen3RMSNorm", 0),
    "Gemma": ("gemma.modeling_gemma.GemmaRMSNorm", 1),
}


def of_transformers(name, *, dtype):
    path, offset = NORM_CLASSES[name]
    module, class_name = path.rsplit(".", 1)
    norm = getattr(importlib.import_module(f"transformers.models.{module}"), class_name)(96, eps=1e-3)
    torch.nn.init.uniform_(norm.weight, 0.5 - offset, 1.5 - offset)
    return norm.to(dtype), offset


@pytest.mark.parametrize("name", NORM_CLASSES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observing", [False, True])
def test_at_gate_one_the_forward_of_transformers_runs(name, dtype, observing):
    stock, _ = of_transformers(name, dtype=dtype)
    norm = taper(copy.deepcopy(stock), Gate(), ema_rate=0.1)
    norm.gate.observing = observing
    h, upstream = normal(5, 96, dtype=dtype), normal(5, 96, seed=9, dtype=dtype)
    ours, theirs = (gradients(n, h, lambda n, x: n(x), upstream) for n in (norm, stock))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    if dtype == torch.float64:  # it computes in float32, where torch's own does not
        gain = gain_of(norm)
        assert not torch.equal(norm(h), F.rms_norm(h, (96,), gain, 1e-3))
        assert close(norm(h), F.rms_norm(h, (96,), gain, 1e-3), 1e-6)


@pytest.mark.parametrize("name", NORM_CLASSES)
@pytest.mark.parametrize("g", GATES)
def test_a_tapered_norm_of_transformers_agrees_with_the_reference(name, g):
    stock, offset = of_transformers(name, dtype=torch.float64)
    norm, h = taper(stock, Gate(), ema_rate=0.1), normal(3, 96)
    assert close(norm.gamma_t, norm.weight + offset)
    with torch.no_grad():
        norm.gamma_t.copy_(normal(96, seed=11))
        norm.c.fill_(0.83)
    norm.gate.set(g)
    gains = {"gamma": array(norm.weight) + offset, "gamma_t": array(norm.gamma_t)}
    exact_gate = norm.gate.value.item()
    expected = reference.taper_rms_norm(array(h), exact_gate, c=norm.c.item(), eps=1e-3, **gains)
    assert close(norm(h), expected, 1e-12 if g == 0 else 1e-6)
    wrong = reference.taper_rms_norm(array(h), exact_gate, c=norm.c.item(), eps=1e-3, **{**gains, "gamma": 1.2})
    assert close(norm(h), wrong, 1e-3) == (g == 0)


@pytest.mark.parametrize("name", NORM_CLASSES)
def test_a_tapered_norm_of_transformers_is_copied_and_turned_back(name):
    stock, _ = of_transformers(name, dtype=torch.float32)
    norm = taper(copy.deepcopy(stock), Gate(), ema_rate=0.1)
    copied = copy.deepcopy(norm)
    assert type(copied) is type(norm)
    assert type(norm).__name__ == f"Taper{type(stock).__name__}"
    untaper(norm)
    assert type(norm) is type(stock)
    assert norm.__dict__.keys() == stock.__dict__.keys()
    assert list(norm.state_dict()) == ["weight"]
    assert isinstance(copied, TaperNorm)


@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_a_gate_that_moves_costs_a_compiled_norm_of_transformers_one_graph_per_form(name):
    torch._dynamo.reset()
    stock, _ = of_transformers(name, dtype=torch.float32)
    norm, counter = taper(stock, Gate(), ema_rate=0.1), CompileCounter()
    norm.c.fill_(0.83)
    compiled = torch.compile(lambda h: norm(h), backend=counter, fullgraph=True, dynamic=False)
    for g in (1.0, 0.8, 0.6, 0.2, 0.0):
        norm.gate.set(g)
        assert close(compiled(normal(3, 96, dtype=torch.float32)), norm(normal(3, 96, dtype=torch.float32)), 1e-6)
    assert counter.frame_count == 3


def test_a_tapered_norm_is_refused_a_second_time():
    with pytest.raises(UserError, match="cannot taper a TaperRMSNorm"):
        taper(tapered_norm("rmsnorm", 7, 1.0), Gate(), ema_rate=0.1)


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
