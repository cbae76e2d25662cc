"""What a norm feeds is seen, not believed: every use but its own linear maps is refused, and the remedy works."""

from dataclasses import replace
from functools import partial

import builders
import pytest
import torch
import torch.nn.functional as F
from builders import NORMS, close, tokens
from mixed import ROW, Block, Mixed, close_gate
from torch import nn

from tapernorm import folding
from tapernorm.architectures import ARCHITECTURES
from tapernorm.fold_check import require_foldable
from tapernorm.folding import fold
from tapernorm.util.errors import UserError

NORM = r"blocks\.0\.ln_1"


@pytest.fixture(autouse=True)
def row(monkeypatch):
    """Puts a row for `Mixed` into the table; call it to put another."""

    def put(**changes):
        monkeypatch.setitem(ARCHITECTURES, "Mixed", replace(ROW, **changes))

    put()
    return put


def mixed(first=Block.first, kind="layernorm", **options):
    """A gated `Mixed` whose blocks do `first` with the first norm's input and output."""
    model = Mixed(kind, type("Other", (Block,), {"first": first}))
    close_gate(model, **options)
    return model


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


def maps(self, x):
    return self.mix(x) * self.gate(x)


def with_item_set(self, h, x):
    x[..., 0] = 0.7
    return maps(self, x)


def with_input_changed(self, h, x):
    before = h.clone()
    h.add_(h.flip(-1))  # a block that adds to the residual stream in place, before the norm's output is read
    return maps(self, x) + before - h


def shift(x):
    return torch.ones_like(x)


USES = {  # how else a norm's output may be used -> what that does to the first half of a block
    "residual": lambda self, h, x: x + maps(self, x),
    "activation": lambda self, h, x: maps(self, x) + F.gelu(x),
    "activation module": lambda self, h, x: maps(self, x) + nn.Sigmoid()(x),
    "Conv1D": lambda self, h, x: maps(self, x) + torch.addmm(self.up.bias, x.flatten(0, 1), self.up.weight).view_as(h),
    "matmul": lambda self, h, x: maps(self, x) + x @ self.up.weight.T,
    "einsum": lambda self, h, x: maps(self, x) + torch.einsum("btd,ed->bte", x, self.up.weight),
    "functional linear": lambda self, h, x: maps(self, x) + F.linear(x, self.up.weight),
    "its own weight": lambda self, h, x: maps(self, x) + F.linear(x, self.mix.weight),
    "by keyword": lambda self, h, x: maps(self, x) + F.linear(weight=self.mix.weight, input=x),
    "bias": lambda self, h, x: maps(self, x) + F.linear(h, self.up.weight, x[0, 0]),
    "keyword": lambda self, h, x: maps(self, x) + torch.mul(input=shift(h), other=x),
    "list": lambda self, h, x: maps(self, x) + torch.stack([h, x]).sum(0),
    "softmax": lambda self, h, x: maps(self, x) + x.softmax(-1),
    "in place": lambda self, h, x: maps(self, x.mul_(0.7)),
    "out": lambda self, h, x: maps(self, torch.add(h, h, out=x)),
    "item set": with_item_set,
    "input in place": with_input_changed,
    "autograd function": lambda self, h, x: maps(self, x) + Doubled.apply(x),
    "operator": lambda self, h, x: maps(self, x) + torch.ops.aten.relu(x),
    "numbers": lambda self, h, x: maps(self, x) + torch.tensor(x.tolist(), dtype=x.dtype),
    "statistic": lambda self, h, x: maps(self, x) * x.std(),
    "shared map": lambda self, h, x: maps(self, x) + self.mix(h),
    "cut rows": lambda self, h, x: maps(self, x) + F.pad(x[..., :17], (0, 13)),
    "other rows": lambda self, h, x: maps(self, x) + x.view(-1, 15).mean(-1).view(*h.shape[:2], 2).repeat(1, 1, 15),
    "turned": lambda self, h, x: maps(self, x) + x.transpose(1, 2).reshape(h.shape),
    "bits": lambda self, h, x: maps(self, x) + x.view(torch.int64) % 7,
    "a view in place": lambda self, h, x: (x[:, 0].mul_(0.7), maps(self, x))[1],
    "a view elsewhere": lambda self, h, x: maps(self, x) + x[:, 0, None].relu(),
    "unnamed map": lambda self, h, x: maps(self, x) + self.down(x),
}
HARMLESS_USES = {  # refused too: nothing here knows that these are linear
    "copied rows": lambda self, h, x: maps(self, x[:, list(range(h.shape[1]))]),
    "joined rows": lambda self, h, x: maps(self, x.view(len(x), -1).view(h.shape)),
    "dropout": lambda self, h, x: maps(self, F.dropout(x, 0.1, training=False)),
    "detached": lambda self, h, x: maps(self, x.detach()),
}


@pytest.mark.parametrize("use", [*USES, *HARMLESS_USES])
@torch.no_grad()
def test_another_use_is_refused_and_an_explicit_scale_works(use, monkeypatch):
    model = mixed({**USES, **HARMLESS_USES}[use])
    expected = model(tokens())
    with pytest.raises(UserError, match=rf"cannot fold {NORM}.*(fused=False|tapernorm\.arch)"):
        fold(model)
    assert close(fold(model, fused=False)[0](tokens()), expected)
    monkeypatch.setattr(folding, "require_foldable", lambda *_: None)
    assert close(fold(model)[0](tokens()), expected) == (use in HARMLESS_USES)  # the audit was needed


ALLOWED = {
    "as it is": Block.first,
    "shape and type": lambda self, h, x: (
        maps(self, x) * (x.shape[-1] + x.size(0) + x.dim() + x.ndim + len(x))
        + (
            x.numel()
            if x.is_contiguous() and x.is_floating_point() and x.dtype == h.dtype and x.device == h.device
            else 0
        )
    ),
    "an identity between": lambda self, h, x: maps(self, nn.Identity()(x)),
    "a view": lambda self, h, x: maps(self, x.view(x.shape)),
    "positions": lambda self, h, x: maps(self, x[:, slice(0, None), :]),
    "rows": lambda self, h, x: maps(self, x.reshape(-1, x.shape[-1]).view(h.shape)),
    "a view for one": lambda self, h, x: self.mix(x[:, :]) * self.gate(x),
    "a map twice": lambda self, h, x: self.mix(x) * self.gate(x) + self.mix(x),
    "by keyword": lambda self, h, x: self.mix(input=x) * self.gate(input=x),
    "input in place afterwards": lambda self, h, x: maps(self, x) + 0 * h.add_(1),
}


@pytest.mark.parametrize("first", ALLOWED.values(), ids=ALLOWED)
@pytest.mark.parametrize("kind", NORMS)
@torch.no_grad()
def test_reading_shapes_and_the_named_maps_alone_is_accepted(first, kind):
    model = mixed(first, kind)
    assert close(fold(model)[0](tokens()), model(tokens()))


# Hooks


def double_input(layer, args):
    return (args[0] * 2,)


def add_input(layer, args, output):
    return output + args[0]


def multiply_input(layer, args, output):
    return output + F.linear(args[0], layer.weight.flip(0))


HOOKS = {
    "pre-hook": lambda layer: layer.register_forward_pre_hook(double_input),
    "hook": lambda layer: layer.register_forward_hook(add_input),
    "hook with a product": lambda layer: layer.register_forward_hook(multiply_input),
    "first hook": lambda layer: layer.register_forward_hook(add_input, prepend=True),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
@torch.no_grad()
def test_what_a_hook_of_a_map_does_with_its_input_is_seen(register, monkeypatch):
    model = mixed()
    register(model.blocks[0].mix)
    expected = model(tokens())
    with pytest.raises(UserError, match=rf"cannot fold {NORM}: its output also goes into (mul|add|linear), outside"):
        fold(model)
    monkeypatch.setattr(folding, "require_foldable", lambda *_: None)
    assert not close(fold(model)[0](tokens()), expected)


@pytest.mark.parametrize("which", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_hook_of_a_norm_would_be_lost(which, fused):
    model = mixed()
    getattr(model.blocks[0].ln_1, which)(lambda *_: None)
    with pytest.raises(UserError, match=rf"cannot fold {NORM}: .*forward hook"):
        fold(model, fused=fused)


@pytest.mark.parametrize(
    "forward",
    [
        lambda layer, x: F.linear(x, 2 * layer.weight, layer.bias),
        lambda layer, x: F.linear(x, layer.weight),
        lambda layer, x: F.linear(x, layer.weight, layer.bias) + x,
    ],
    ids=["another weight", "no bias", "more"],
)
def test_a_map_whose_forward_was_replaced_is_refused(forward):
    model = mixed()
    layer = model.blocks[0].mix
    layer.forward = partial(forward, layer)
    with pytest.raises(UserError, match=rf"cannot fold {NORM}: its output also goes into (linear|add), outside"):
        fold(model)


# Maps that two norms feed


def shared(model):
    """Let both norms of the first block feed `mix`."""
    block = model.blocks[0]
    block.up = block.mix
    return model


@pytest.mark.parametrize("second", ["mix", "up"])
def test_a_map_that_two_norms_feed_is_refused(row, second):
    row(internal={**ROW.internal, "ln_2": (second,)})
    with pytest.raises(UserError, match=r"cannot fold blocks\.0\.ln_"):
        fold(shared(mixed()))


def test_a_map_shared_with_a_norm_that_is_not_tapered_is_refused(row):
    row(internal={**ROW.internal, "ln_2": ("mix",)})
    model = mixed(sites=["*.ln_1"])
    for block in model.blocks:
        block.up = block.mix
    with pytest.raises(UserError, match=r"is shared, because something that is not a tapered norm"):
        fold(model)


# The table's row


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("made", [Scaled, nn.Bilinear, nn.Conv1d, nn.Identity])
def test_a_consumer_of_another_class_is_refused(made):
    model = mixed()
    model.blocks[0].mix = {
        Scaled: lambda: Scaled(30, 30),
        nn.Bilinear: lambda: nn.Bilinear(30, 30, 30),
        nn.Conv1d: lambda: nn.Conv1d(30, 30, 1),
        nn.Identity: nn.Identity,
    }[made]()
    message = (
        rf"cannot fold {NORM} into blocks\.0\.mix: it is a {made.__name__}, not an nn\.Linear or Conv1D; .*fused=False"
    )
    with pytest.raises(UserError, match=message):
        fold(model)


# No trace


@pytest.mark.parametrize("first", [Block.first, USES["residual"]], ids=["accepted", "refused"])
def test_the_audit_leaves_no_hook_and_does_not_touch_a_gradient(first):
    model = mixed(first)

    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    before = hooks(), builders.snapshot(model.state_dict())
    named = {"blocks.0.ln_1": ["blocks.0.mix", "blocks.0.gate"]}
    if first is Block.first:
        require_foldable(model, named, tokens())
    else:
        with pytest.raises(UserError, match="add"):
            require_foldable(model, named, tokens())
    assert (hooks(), builders.snapshot(model.state_dict())) == before
    model(tokens()).sum().backward()
    assert model.embed.weight.grad is not None


def test_a_failing_forward_pass_leaves_no_hook():
    model = mixed(lambda self, h, x: self.mix(x) @ self.down(x))
    with pytest.raises(RuntimeError):
        require_foldable(model, {"blocks.0.ln_1": ["blocks.0.mix"]}, tokens())
    assert not any(m._forward_hooks for m in model.modules())
