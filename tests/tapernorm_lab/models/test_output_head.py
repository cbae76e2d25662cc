"""The loss of the output head in chunks, judged by autograd over the whole logit matrix in float64."""

import copy

import builders
import pytest
import torch
import torch.nn.functional as F
from builders import close
from tiny_models import CASES, OURS, tiny
from torch import nn

from tapernorm.architectures import hidden_of, logits_of, output_head
from tapernorm_lab.models import output_head as module
from tapernorm_lab.models.output_head import IGNORED, head_cross_entropy, logits_by_chunk
from tapernorm_lab.training.training_loss import cross_entropy, training_loss

B, T, D, V = 3, 7, 5, 11
ROWS = 4  # of a chunk: five whole ones and a last of one token


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setitem(module._CHUNK, "cpu", ROWS * V + 3)
    monkeypatch.setattr(module, "_LEAST_ROWS", 0)


def problem(*, bias=False, dtype=torch.float64):
    """Head, hidden states, whose logits differ widely, and targets, some of which do not count."""
    head = nn.Linear(D, V, bias=bias, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(2 * builders.normal(V, D, seed=1))
        if bias:
            head.bias.copy_(builders.normal(V, seed=2))
    hidden = (3 * builders.normal(B, T, D, seed=3)).to(dtype).requires_grad_()
    targets = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(4))
    targets[:, -1] = IGNORED
    targets[1, :3] = IGNORED
    return head, hidden, targets


def whole(head, hidden, targets):
    return F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def derived(loss, head, hidden, targets, *, share=1.0):
    """The loss, and the gradients of `share` times it, all in float64."""
    value = loss(head, hidden, targets)
    gradients = torch.autograd.grad(share * value, [hidden, *head.parameters()])
    return [found.detach().double() for found in (value, *gradients)]


def agree(found, expected, tolerance=1e-12):
    return [close(a, b, tolerance) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, ROWS, B * T, 1000])
@pytest.mark.parametrize("narrow", [0, D])
def test_loss_and_gradients_are_those_of_the_whole_matrix(bias, rows, narrow, monkeypatch):
    monkeypatch.setattr(module, "_NARROW", narrow)
    monkeypatch.setitem(module._CHUNK, "cpu", rows * V)
    head, hidden, targets = problem(bias=bias)
    found = derived(head_cross_entropy, head, hidden, targets, share=0.37)
    expected = derived(whole, head, hidden, targets, share=0.37)
    assert len(found) == 3 + bias
    assert all(agree(found, expected))
    other = derived(whole, head, hidden, targets.clamp(min=0), share=0.37)  # what does not count would count
    assert not any(agree(found, other))
    assert not any(agree(found[1:], derived(whole, head, hidden, targets)[1:]))  # without the share


def test_the_operator_is_what_it_says_it_is():
    """Its form without data, its gradients' registration and its strides, as torch.library checks them."""
    for bias in (False, True):
        head, hidden, targets = problem(bias=bias)
        arguments = (hidden.flatten(0, 1), head.weight, head.bias, targets.flatten())
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(module._linear_cross_entropy, arguments, test_utils=checks)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_rounding_is_no_worse_than_that_of_the_whole_matrix(precision):
    head, hidden, targets = problem()
    exact = derived(whole, head, hidden, targets)
    head, hidden, targets = problem(dtype=torch.float32)

    def distances(loss):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            found = derived(loss, head, hidden, targets)
        return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]

    ours, theirs = distances(head_cross_entropy), distances(lambda h, x, t: cross_entropy(h(x), t))
    assert all(a <= 2 * b + 1e-7 for a, b in zip(ours, theirs, strict=True))
    assert (max(ours) > 1e-4) == (precision == "bf16")  # autocast was heard


def test_huge_logits_neither_overflow_nor_vanish():
    head, hidden, targets = problem(dtype=torch.float32)
    hidden = (1e4 * hidden).detach().requires_grad_()
    found, expected = (derived(loss, head, hidden, targets) for loss in (head_cross_entropy, whole))
    assert found[0] > 1e4
    assert all(agree(found, expected, 1e-6))


def test_a_logit_that_is_not_finite_is_seen_and_no_target_at_all_has_no_mean():
    head, hidden, targets = problem()
    assert head_cross_entropy(head, hidden, torch.full_like(targets, IGNORED)).isnan()
    with torch.no_grad():
        head.weight[0, 0] = torch.inf
    assert not head_cross_entropy(head, hidden, targets).isfinite()


def test_no_chunk_is_larger_than_its_share(monkeypatch):
    sizes = []

    def noted(x, weight, *rest):
        if weight.shape == (V, D):  # not a gradient's
            sizes.append(len(x))
        return F.linear(x, weight, *rest)

    head, hidden, targets = problem()
    monkeypatch.setattr(module, "linear", noted)
    head_cross_entropy(head, hidden, targets)
    chunks = [ROWS] * 5 + [1]
    assert sizes == chunks
    found = list(logits_by_chunk(head, hidden))
    assert list(map(len, found)) == chunks
    assert close(torch.cat(found), head(hidden).flatten(0, 1))
    monkeypatch.setattr(module, "_LEAST_ROWS", 2)
    sizes.clear()
    head_cross_entropy(head, hidden, targets)
    assert sizes == [2 * D, 2 * D, 1]


def test_a_second_backward_pass_is_the_same_and_a_second_derivative_is_refused():
    head, hidden, targets = problem()
    loss = head_cross_entropy(head, hidden, targets)
    one, other = (torch.autograd.grad(loss, head.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, other)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("name", [*CASES, *OURS])
def test_the_training_loss_of_every_architecture_is_that_of_its_logits(name):
    """Tied and untied heads, with a bias and without."""
    model = tiny(name)
    stock = copy.deepcopy(model)
    ids = builders.tokens()
    targets = ids.roll(-1, 1)
    targets[:, -1] = IGNORED
    assert torch.equal(output_head(model)(hidden_of(model, ids)), logits_of(model, ids))
    ours, theirs = training_loss(model, None, ids, targets)[0], cross_entropy(logits_of(stock, ids), targets)
    assert close(ours.detach(), theirs.detach())
    ours.backward()
    theirs.backward()
    expected, found = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (stock, model))
    assert found.keys() == expected.keys()
    assert close(*(torch.cat([gradient.flatten() for gradient in all_.values()]) for all_ in (found, expected)))
