"""The level loss of a control: its gradient, by autograd through a plain model, and the norms, which stay exact."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import close, tokens
from tiny_models import tiny
from torch import Tensor, nn

from tapernorm.architectures import architecture_of, logits_of, select_norms
from tapernorm_lab.own_model.job import job_of
from tapernorm_lab.own_model.options import Request
from tapernorm_lab.own_model.train import attach_control

WEIGHT, STEPS = 0.2, 20
SITES = {"llama": ("*.0.*",), "gpt2": ("*.ln_2",)}


def losses(model: nn.Module, names: list[str], batch: Tensor, levels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and sum over norms of E (log s - log level)^2 by hooks on the plain norms.

    `levels` (N,) are logs; None takes each norm's mean log s over the batch, without a gradient.
    """
    seen: dict[str, Tensor] = {}

    def keeping(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda _, given: seen.update({name: given[0]})

    hooks = [model.get_submodule(name).register_forward_pre_hook(keeping(name)) for name in names]
    logits = logits_of(model, batch)
    for hook in hooks:
        hook.remove()
    total = logits.new_zeros(())
    for number, name in enumerate(names):
        norm: Any = model.get_submodule(name)
        h = seen[name]
        v = h - h.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else h
        eps = norm.eps if isinstance(norm, nn.LayerNorm) else norm.variance_epsilon
        logs = 0.5 * (v.pow(2).sum(-1) / h.shape[-1] + eps).log()
        level = logs.detach().mean() if levels is None else levels[number]
        total = total + ((logs - level) ** 2).mean()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()), total


def gradient(model: nn.Module, names: list[str], batch: Tensor, levels: Tensor | None = None) -> Tensor:
    ce, level = losses(model, names, batch, levels)
    return flat(torch.autograd.grad(ce + WEIGHT * level, list(model.parameters())))


def flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("name", SITES)
def test_the_gradient_of_a_control_holds_the_level_loss_at_the_sites_of_its_taper(name):
    plain = tiny(name).double().train()
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = copy.deepcopy(plain)
    asked: dict[str, Any] = {
        "model": "",
        "data": (),
        "steps": STEPS,
        "out": Path(),
        "device": "cpu",
        "keep_norms": True,
    }
    job = job_of(Request(**asked, level_weight=WEIGHT, sites=SITES[name]), model)
    assert job.levels_fixed_at is not None
    names = select_norms(plain, final=False, sites=SITES[name])
    others = [norm for norm in architecture_of(plain).norms(plain) if norm not in names]
    control = attach_control(model, job, fixed_at=job.levels_fixed_at)
    own = [parameter for key, parameter in model.named_parameters() if not key.endswith("gamma_t")]
    fixed: Tensor | None = None
    for step, seed in ((0, 1), (job.levels_fixed_at, 2), (STEPS - 1, 3)):
        batch = tokens(seed=seed)
        control.set_step(step)
        with control.observe():
            logits = logits_of(model, batch)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()) + control.anchor_loss()
        found = torch.autograd.grad(loss, own)
        assert torch.equal(logits, logits_of(plain, batch))  # g = 1, with fixed levels too
        expected = gradient(plain, names, batch, fixed)
        assert close(flat(found), expected, 1e-12)
        assert not close(gradient(plain, [], batch), expected, 1e-3)  # without the loss
        assert not close(gradient(plain, others, batch), expected, 1e-3)  # at the other norms
        if fixed is None:  # what step 0 saw is all that the running means hold
            fixed = torch.stack([mean_log(plain, norm, batch) for norm in names])
    assert control.gate.item() == 1.0
    control.set_step(STEPS)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert model.state_dict().keys() == plain.state_dict().keys()


def mean_log(model: nn.Module, name: str, batch: Tensor) -> Tensor:
    """Mean of x = log s at one norm, from E x^2 and E (x - 1)^2."""
    at_zero, at_one = (losses(model, [name], batch, torch.tensor([level]))[1] for level in (0.0, 1.0))
    return ((at_zero - at_one + 1) / 2).detach()  # E x^2 - E (x - 1)^2 = 2 E x - 1
