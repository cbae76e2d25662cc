"""Float32 linear maps through oneDNN: as accurate as PyTorch's own, only where meant, and nothing else moves."""

import copy
import io
import subprocess
import sys
from typing import Any, cast

import pytest
import torch
from builders import shape as decoder_shape
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

import tapernorm
from tapernorm import linear_kernel
from tapernorm.models.decoder import Decoder
from tapernorm.util.rng import generator

IN, OUT, ROWS = 48, 160, 192  # with more than 2**20 products


@pytest.fixture(autouse=True)
def _default_kernel():
    yield
    tapernorm.set_linear_kernel("aten")


@pytest.fixture
def products(monkeypatch):
    """The shapes of the products that oneDNN computes."""
    seen, onednn = [], linear_kernel._onednn

    def counted(left, right, bias):
        seen.append((*left.shape, right.shape[0]))
        return onednn(left, right, bias)

    monkeypatch.setattr(linear_kernel, "_onednn", counted)
    return seen


class Tied(nn.Module):
    """A head whose weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(OUT, IN)
        self.head = nn.Linear(IN, OUT, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        ids = torch.arange(x[..., 0].numel(), device=x.device).view(x.shape[:-1]) % OUT
        return self.head(x + self.embedding(ids))


class Frozen(nn.Linear):
    """A map whose weight is not trained."""

    def __init__(self):
        super().__init__(IN, OUT)
        self.weight.requires_grad_(False)


MODELS = {
    "wider": lambda: nn.Linear(IN, OUT),
    "narrower": lambda: nn.Linear(OUT, IN),
    "no bias": lambda: nn.Linear(IN, OUT, bias=False),
    "Conv1D": lambda: Conv1D(OUT, IN),
    "Conv1D, narrower": lambda: Conv1D(IN, OUT),
    "tied head": Tied,
    "frozen": Frozen,
}
INPUTS = {
    "rows": lambda draw, i: torch.randn(ROWS, i, generator=draw),
    "batch": lambda draw, i: torch.randn(3, ROWS // 3, i, generator=draw),
    "transposed": lambda draw, i: torch.randn(ROWS // 3, 3, i, generator=draw).transpose(0, 1),
    "columns of another": lambda draw, i: torch.randn(ROWS, 2 * i, generator=draw)[:, ::2],
}


def model_of(name):
    """A model with random weights; and its input width."""
    model, draw = MODELS[name](), generator(1, "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5, generator=draw)
    return model, OUT if "narrower" in name else IN


def passes(model, x, g):
    """Output and all gradients of one forward and backward pass, by name."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(g.to(y.dtype).view_as(y))
    return {"y": y.detach(), "x": x.grad} | {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def errors(found, exact):
    """Root mean square distance to float64, relative to the values, by name."""
    assert found.keys() == exact.keys()
    return {
        name: ((found[name].double() - exact[name]).square().mean() / exact[name].square().mean()).sqrt().item()
        for name in exact
    }


def rounded(model, x, g):
    """The same passes with operands rounded to bfloat16: what an inexact product looks like."""
    coarse = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in coarse.parameters():
            parameter.copy_(parameter.bfloat16())
    return passes(coarse, x.bfloat16().float(), g.bfloat16().float())


CASES = [
    (name, shape)
    for name in MODELS
    for shape in INPUTS
    if not (name.startswith("Conv1D") and shape == "transposed")  # it takes no view that it cannot flatten
]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_onednn_is_as_near_to_float64_as_the_default_is(name, shape, products):
    model, width = model_of(name)
    draw = generator(2, "input")
    x = INPUTS[shape](draw, width)
    g = torch.randn(x[..., 0].numel(), OUT + IN - width, generator=draw)
    exact = passes(copy.deepcopy(model).double(), x.double(), g)
    default = errors(passes(model, x, g), exact)
    assert not products
    with tapernorm.set_linear_kernel("onednn"):
        chosen = errors(passes(model, x, g), exact)
        assert len(products) == 2 + (name != "frozen")
        assert all(error > 1e-4 for error in errors(rounded(model, x, g), exact).values())
    for tensor, error in chosen.items():
        assert error <= max(2 * default[tensor], 2e-7), (tensor, error, default[tensor])


@pytest.mark.parametrize("rows", [0, 1, 15])
def test_few_rows_are_left_to_the_default(rows, products):
    layer, x = nn.Linear(512, 4096), torch.randn(rows, 512)
    expected = layer(x)
    tapernorm.set_linear_kernel("onednn")
    assert torch.equal(layer(x), expected)
    assert not products
    layer(torch.randn(16, 512))
    assert products == [(16, 512, 4096)]  # the control


OTHERS = {
    "float64": lambda layer, x: layer.double()(x.double()),
    "autocast": lambda layer, x: torch.autocast("cpu", torch.bfloat16)(layer)(x),
    "vmap": lambda layer, x: vmap(layer)(x.expand(2, -1, -1)),
    "functional gradient": lambda layer, x: grad(lambda p: functional_call(layer, p, x).square().sum())(
        dict(layer.named_parameters())
    )["weight"],
    "another device": lambda layer, x: layer.to("meta")(x.to("meta")).shape,
    "another class": lambda layer, x: layer(x.as_subclass(type("Mine", (torch.Tensor,), {}))).as_subclass(torch.Tensor),
    "a trace": lambda layer, x: cast(Any, torch.jit.trace(layer, x, check_trace=False))(x),
    "an exported graph": lambda layer, x: torch.export.export(layer, (x,)).graph_module.code,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_what_onednn_does_not_take_is_computed_as_before(name, products):
    x = torch.randn(ROWS, IN, generator=generator(2, "input"))
    expected = OTHERS[name](model_of("wider")[0], x)
    tapernorm.set_linear_kernel("onednn")
    found = OTHERS[name](model_of("wider")[0], x)
    assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
    assert not products
    model_of("wider")[0](x)
    assert products  # the control


def test_forward_mode_and_counted_operations_are_those_of_the_default(products):
    layer, x = nn.Linear(IN, OUT), torch.randn(ROWS, IN)
    tapernorm.set_linear_kernel("onednn")
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    assert tangent is not None
    assert torch.allclose(tangent, layer.weight.sum(1).expand(ROWS, -1), atol=1e-5)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * ROWS * IN * OUT
    assert not products


def test_gradients_of_gradients_agree_with_float64(products):
    layer, x = nn.Linear(IN, OUT), torch.randn(ROWS, IN)

    def second(layer, x):
        x = x.requires_grad_()
        (first,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), layer.weight)[0]

    exact = second(copy.deepcopy(layer).double(), x.double())
    tapernorm.set_linear_kernel("onednn")
    found = second(layer, x)
    assert products
    assert torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_graph_takes_the_kernel_too(backend):
    model, x = nn.Sequential(nn.Linear(IN, OUT), nn.GELU(), Conv1D(IN, OUT)), torch.randn(3, ROWS // 3, IN)
    g = torch.randn(ROWS, IN)
    expected = passes(model, x, g)
    tapernorm.set_linear_kernel("onednn")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found = passes(compiled, x, g)
    with torch.profiler.profile() as profile:
        passes(compiled, x, g)
    assert {event.key: event.count for event in profile.key_averages()}["mkldnn::_linear_pointwise"] == 6
    for (name, a), b in zip(found.items(), expected.values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4), name


def test_models_and_their_classes_are_untouched():
    before = nn.Linear.forward, Conv1D.forward
    model = nn.Sequential(nn.Linear(IN, OUT), Conv1D(IN, OUT))
    names, x = list(model.state_dict()), torch.randn(ROWS, IN)
    with tapernorm.set_linear_kernel("onednn"):
        assert tapernorm.get_linear_kernel() == "onednn"
        assert nn.Linear.forward is not before[0]
        assert Conv1D.forward is not before[1]
        expected = model(x)
        assert list(model.state_dict()) == names
        assert not any("forward" in vars(layer) for layer in model)
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(x), expected)
        assert torch.equal(copy.deepcopy(model)(x), expected)
        with tapernorm.set_linear_kernel("aten"):
            assert (nn.Linear.forward, Conv1D.forward) == before
        assert tapernorm.get_linear_kernel() == "onednn"
    assert (nn.Linear.forward, Conv1D.forward) == before
    assert tapernorm.get_linear_kernel() == "aten"
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), model(x))


def test_hooks_of_a_map_see_its_input_and_output(products):
    layer, x, seen = nn.Linear(IN, OUT), torch.randn(ROWS, IN, requires_grad=True), []
    layer.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    layer.register_full_backward_hook(lambda _, to_input, __: seen.append(to_input[0]))
    tapernorm.set_linear_kernel("onednn")
    y = layer(x)
    y.sum().backward()
    assert products
    assert torch.equal(seen[0][0], x)
    assert torch.equal(seen[0][1], y)
    assert x.grad is not None
    assert torch.equal(seen[1], x.grad)


def test_a_decoder_tapers_and_folds_under_it(products):
    model = Decoder(decoder_shape(tie_head=True, vocab_size=4096)).initialize(generator(0, "init"))
    tokens = torch.randint(model.config.vocab_size, (16, model.config.context), generator=generator(1, "tokens"))
    taper = tapernorm.attach(model, final=True, schedule=tapernorm.GateSchedule(1, 2))
    with taper.observe(), torch.no_grad():
        model(tokens)
    taper.calibrate()
    taper.set_gate(0.0)
    expected, (folded, report) = model(tokens), tapernorm.fold(model)
    tapernorm.set_linear_kernel("onednn")
    again, other = tapernorm.fold(model)
    assert other == report
    assert all(torch.equal(a, b) for a, b in zip(folded.parameters(), again.parameters(), strict=True))
    assert torch.allclose(model(tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("onednn_first", [True, False])
def test_a_conv1d_that_is_imported_later_takes_it_too(onednn_first):
    choose = "tapernorm.set_linear_kernel('onednn')"
    load = "from transformers.pytorch_utils import Conv1D"
    first, second = (choose, load) if onednn_first else (load, choose)
    code = f"""
import sys, torch, tapernorm
from tapernorm import linear_kernel
{first}
{second}
own, onednn, seen = Conv1D.forward.__wrapped__, linear_kernel._onednn, []
linear_kernel._onednn = lambda *operands: seen.append(1) or onednn(*operands)
Conv1D(160, 48)(torch.randn(192, 48))
assert seen
tapernorm.set_linear_kernel("aten")
assert Conv1D.forward is own
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("tapernorm")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_choosing_a_kernel_imports_no_transformers():
    code = "import sys, tapernorm; tapernorm.set_linear_kernel('onednn'); assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_kernel_and_a_pytorch_without_onednn_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="none of aten, onednn"):
        tapernorm.set_linear_kernel(cast(Any, "mkl"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(tapernorm.UserError, match="take aten"):
        tapernorm.set_linear_kernel("onednn")
    assert tapernorm.get_linear_kernel() == "aten"
