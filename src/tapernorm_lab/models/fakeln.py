"""FakeLN, the staged predecessor of the taper: attach it to a GPT-2 and drive it (method.md section 10).

fakeln = attach_fakeln(model, schedule=schedule, aux_weight=0.1, eot=tokenizer.eos_token_id)
for k, tokens in enumerate(batches):
    fakeln.set_step(k)
    with fakeln.observe():  # one update of every mean sigma at its end, whatever the number of micro-batches
        loss = cross_entropy(model(tokens)) + fakeln.auxiliary_loss(tokens)
        loss.backward()
    optimizer.step()

Shapes: tokens (B, T), sigma (B, T, 1).
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.architectures import architecture_of
from tapernorm.attach_checks import require_attachable, require_options, unchanged_on_error
from tapernorm.calibrate import update_means
from tapernorm.scale_loss import ScaleProbe, fixed_target_loss
from tapernorm.token_mask import TokenMask
from tapernorm.util.errors import UserError
from tapernorm.util.norm_driver import buffers_of, install, load_buffers, require_free, require_trained

from ..config.fakeln_schedule import FakeSchedule, removal_steps, removed_at
from .fakeln_norms import FakeLayerNorm, make_fake, require_plain


def attach_fakeln(
    model: nn.Module, *, schedule: FakeSchedule, ema_rate: float = 1.0, aux_weight: float, eot: int | None
) -> "FakeLN":
    """Turn every norm of a GPT-2 into its fake form, in place, without removing any.

    Until the first removal the model computes the same bits as before. No parameter is added.

    Args:
        model: a GPT2LMHeadModel of transformers.
        schedule: steps at which the sites are removed.
        ema_rate: weight of an optimizer step's mean in the running mean of sigma; 1: no smoothing.
        aux_weight: lambda of the auxiliary loss; 0: no such loss.
        eot: id of the end-of-text token, which the target of the auxiliary loss leaves out; None: there is none.

    Raises:
        UserError: the model is not a GPT-2, is already attached, or has other norms than plain ones. A number is out
            of range, or stages of the schedule overlap at its depth. The model is unchanged after an error.
    """
    if type(model).__name__ != "GPT2LMHeadModel":
        raise UserError(f"FakeLN takes a GPT2LMHeadModel of transformers, got a {type(model).__name__}")
    require_options(schedule=None, ema_rate=ema_rate, aux_weight=aux_weight)
    require_free(model)
    arch = architecture_of(model)
    depth = arch.depth(model)
    removal_steps(schedule, depth)
    names = arch.norms(model)
    require_attachable(model, names)
    for name in names:
        require_plain(model, name)
    with unchanged_on_error(model.modules()):
        norms = {name: make_fake(model, name, ema_rate=ema_rate) for name in names}
        tokens = TokenMask(model.get_submodule(arch.trunk))
        final = model.get_submodule(arch.final)
        made = FakeLN(norms, final, tokens, schedule, depth, aux_weight=aux_weight, eot=eot)
        install(made, model)
    return made


class FakeLN:
    """The driver of the fake norms of one GPT-2: removals, mean sigmas and auxiliary loss. Made by `attach_fakeln`.

    Attributes:
        removals: site -> step at which it is removed, in that order. A site is a norm, or one of ln_1's two parts.
        tokens: mask of the tokens of the last forward pass that count.
    """

    def __init__(
        self,
        norms: dict[str, FakeLayerNorm],
        final_norm: nn.Module,
        tokens: TokenMask,
        schedule: FakeSchedule,
        n_layer: int,
        *,
        aux_weight: float,
        eot: int | None,
    ) -> None:
        self._norms = norms
        self.tokens = tokens
        for norm in norms.values():
            norm.tokens = tokens
        self._final_norm = final_norm
        self._probe = ScaleProbe.on(final_norm)
        self._n_layer = n_layer
        self.schedule = schedule
        self.removals = removal_steps(schedule, n_layer)
        self.aux_weight = aux_weight
        self.eot = eot

    @property
    def removed(self) -> tuple[str, ...]:
        """The sites that no longer normalise, in the order of removal."""
        return tuple(site for site in self.removals if self._is_removed(site))

    @property
    def constants(self) -> dict[str, float]:
        """sigma_bar of each site; NaN until it is removed."""
        return {site: self._sigma_bar(site).item() for site in self.removals}

    @property
    def forms(self) -> int:
        """Number of forms that the norms take: 1 plus the number of steps at which a site is removed."""
        return 1 + len(set(self.removals.values()))

    @property
    def scale_target(self) -> None:
        """None, because the auxiliary loss uses each micro-batch's own mean instead of a fixed target."""
        return

    def row(self) -> dict[str, float | None]:
        """Return the entries of a metrics row: share of sites that still normalise, and number of removed sites."""
        removed = len(self.removed)
        return {"gate": 1 - removed / len(self.removals), "removed": removed, "scale_target": None}

    def set_step(self, step: int) -> None:
        """Remove the sites that the schedule removes up to optimizer step k = `step`, before its forward pass.

        A site without a sigma_bar gets it here, from the means observed so far, and keeps it.

        Raises:
            UserError: no statistics were observed before a removal, or they are not finite.
        """
        removed = removed_at(step, self.schedule, self._n_layer)
        if removed == self.removed:
            return
        self._freeze([site for site in removed if not self._is_removed(site)])
        for site in self.removals:
            self._mark(site, removed=site in removed)

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Collect sigma in the training passes inside a `with` block, and update each mean once at its end.

        Sites that are removed collect none. Positions with `attention_mask` 0 do not count. An error drops the
        collected statistics.
        """
        for norm in self._norms.values():
            norm.observing = True
        try:
            yield
            update_means(norm.statistics for norm in self._norms.values())
        finally:
            for norm in self._norms.values():
                norm.observing = False
                norm.statistics.forget()

    def auxiliary_loss(self, tokens: Tensor) -> Tensor:
        """Return lambda E[(sigma - sigma_hat)^2] of the last forward pass over `tokens` (B, T), a scalar.

        sigma is that of the final norm's input. sigma_hat is its mean, without gradient, over the tokens that are
        neither the first of a row nor end-of-text. Without any such token the loss is 0. Both means leave out padding.
        Every micro-batch has its own sigma_hat, so that the loss of a split batch differs from that of the whole batch.
        """
        sigma = self._probe.scale(self._final_norm)
        if self.aux_weight == 0:
            return sigma.new_zeros(())
        typical = torch.ones_like(tokens, dtype=torch.bool) if self.eot is None else tokens != self.eot
        counted = self.tokens.counted(sigma)
        if counted is None:
            typical[:, 0] = False
        else:
            typical &= (counted & (counted.cumsum(1) > 1)).squeeze(-1)
        weights = typical[..., None].to(sigma.dtype)
        count = weights.sum()
        target = (sigma.detach() * weights).sum() / count.clamp(min=1)
        return self.aux_weight * fixed_target_loss(sigma, target, counted) * (count > 0)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UserError if the optimizer lacks a parameter of a norm; removed norms are trained further."""
        require_trained(self._norms, optimizer, "build it from model.parameters()")

    def state_dict(self) -> dict[str, Any]:
        """Return running means and removals as tensors; the model's own state dict holds each sigma_bar."""
        state = {key: buffer.detach().clone() for key, buffer in self._buffers().items()}
        return state | {"removed": torch.tensor([self._is_removed(site) for site in self.removals])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned; load the model's own state dict as well.

        Raises:
            UserError: the state belongs to another model; nothing is changed then.
        """
        load_buffers(self._buffers(), state, others=["removed"], what="FakeLN")
        for site, removed in zip(self.removals, state["removed"].tolist(), strict=True):
            self._mark(site, removed=removed)

    def _buffers(self) -> dict[str, Tensor]:
        return buffers_of({f"{name}.statistics": norm.statistics for name, norm in self._norms.items()})

    def _part(self, site: str) -> tuple[FakeLayerNorm, int]:
        """Return the norm of a site, and the index of the site among the norm's parts."""
        if site in self._norms:
            return self._norms[site], 0
        name, _, part = site.rpartition(".")
        norm = self._norms[name]
        return norm, norm.parts.index(part)

    def _sigma_bar(self, site: str) -> Tensor:
        norm, part = self._part(site)
        return norm.sigma_bars[part]

    def _is_removed(self, site: str) -> bool:
        norm, part = self._part(site)
        return norm.removed[part]

    def _mark(self, site: str, *, removed: bool) -> None:
        norm, part = self._part(site)
        norm.removed = (*norm.removed[:part], removed, *norm.removed[part + 1 :])

    def _freeze(self, sites: list[str]) -> None:
        """Set sigma_bar to the mean so far for all of `sites` that have none; after an error nothing is changed."""
        missing = [site for site in sites if math.isnan(self._sigma_bar(site).item())]
        means = {site: self._part(site)[0].statistics.value()[0] for site in missing}
        for site, mean in means.items():
            if not math.isfinite(mean.item()):
                updates = int(self._part(site)[0].statistics.updates)
                raise UserError(
                    f"cannot remove {site} after {updates} updates of its mean sigma ({mean.item()}): "
                    "train inside FakeLN.observe() before the first removal"
                )
        for site, mean in means.items():
            self._sigma_bar(site).copy_(mean)
