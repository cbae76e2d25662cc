"""The trainer: a loop over optimizer steps that can be killed at any point and resumes bitwise.

Step k is a function of (settings, k, state). The batch, the learning rate and the gate are pure functions of k. Nothing
is therefore replayed on resume, and evaluation or logging cannot change the training.

Several processes may train one model, one per device (`ranks`). Each takes its share of the rows of every batch. The
gradients, the norms' statistics and the losses of an optimizer step are those of the whole batch on every process.
"""

import math
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tapernorm.architectures import architecture_of, output_head, vocabulary_of
from tapernorm.scale_loss import ScaleProbe
from tapernorm.taper import Taper
from tapernorm.util.atomic_files import read_json, write_json
from tapernorm.util.distributed import rank, sum_over_ranks
from tapernorm.util.progress import Progress
from tapernorm.util.rng import seed_dropout

from ..models.output_head import logits_by_chunk
from .find_overflow import Diverged, find_overflow
from .metrics import MetricsFile, NoMetrics, StepMeter, gradient_norm, parameter_groups
from .norm_driver import NormDriver, driver_of
from .plan import Plan, settle_linear_kernel
from .ranks import asked_to_stop, from_leader, leads, require_ranks, share_of, stop_if_asked, sum_gradients
from .resume_checkpoints import Checkpoints
from .stop_signals import Stopped, until_safe
from .training_loss import checkpoint_activations, compiled_loss, training_loss
from .validation_loss import Evaluation

_EXPLODED = 1.5  # multiple of log(vocabulary) above which a loss is reported; a random model starts at about 1


class Trainer:
    """Train `model` by `plan`, from its newest checkpoint if there is one.

    The kernel of its linear maps is this process's from then on.

    Raises:
        UserError: the number of processes is not hardware.devices_per_job, the optimizer lacks a norm's parameter, or
            this PyTorch lacks the kernel that hardware.linear names.
    """

    def __init__(self, model: nn.Module, changes: Taper | NormDriver | None, plan: Plan) -> None:
        require_ranks(plan.hardware.devices_per_job)
        plan = settle_linear_kernel(plan, model)
        self.model, self.driver, self.plan = model, driver_of(changes), plan
        self.device = next(model.parameters()).device
        self.optimizer = plan.optimisation.optimizer(model)
        if self.driver is not None:
            self.driver.check(self.optimizer)
        if plan.hardware.activation_checkpointing:
            checkpoint_activations(model)
        self.parameters = list(model.parameters())
        self.groups = parameter_groups(model)
        self.final_norm = model.get_submodule(architecture_of(model).final)
        self.probe = ScaleProbe.on(self.final_norm)
        self.loss = compiled_loss(self.driver, self.device, plan.label) if plan.hardware.compile else training_loss
        self.checkpoints = Checkpoints(plan.folder, plan.fingerprint)
        self._marker = plan.folder / "diverged.json"
        self.elapsed_s = 0.0  # training time over all attempts
        self._metrics_bytes = 0  # size of the metrics file at the last checkpoint
        self._unvalidated = False  # whether the validation after the last step was interrupted
        self._exploded = False  # whether a very large loss has been reported

    def run(self) -> Evaluation:
        """Train to the last step, and return the validation score of the finished model.

        Raises:
            Diverged: the run diverged now, or in an earlier attempt, which is not repeated.
            Stopped: a signal arrived. The current micro-batch was finished and a checkpoint written; the next attempt
                repeats an unfinished step or validation.
        """
        self._refuse_known_divergence()
        start = self._resume()
        metrics = self._metrics(start)
        progress = Progress(self.plan.label, self.plan.steps, start=start, shown=leads())
        self.model.train()
        try:
            with until_safe():
                if self._unvalidated:
                    self._validate(start - 1, metrics)
                for k in range(start, self.plan.steps):
                    try:
                        row = self._timed_step(k)
                    except Diverged as error:
                        raise self._after_divergence(k, metrics, error) from None
                    except Stopped:
                        self._drop_step(k, metrics)
                        raise
                    self._tell_of_explosion(row)
                    if self._is_logged(k):
                        metrics.write(row)
                    self._validate(k, metrics)
                    stop = asked_to_stop()
                    self._checkpoint(k + 1, metrics, now=stop is not None)
                    progress.update(k + 1, loss=f"{row['loss']:.3f}", gate=f"{row['gate']:.2f}")
                    if stop is not None:
                        raise Stopped(stop)
        finally:
            progress.close()
            metrics.close()
        if self.driver is not None:
            self.driver.set_step(self.plan.steps)
        return self.plan.validate() if self.plan.tolerant else self._score(self.plan.steps - 1)

    def step(self, k: int) -> dict[str, Any]:
        """Do optimizer step k, and return its metrics.

        Raises:
            Diverged, Stopped: nothing was updated, and the norms' statistics of this step are dropped.
        """
        seed_dropout(self.plan.seed, k, rank())
        lr = self.plan.optimisation.lr_at(k)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.driver is not None:
            self.driver.set_step(k)
        with nullcontext() if self.driver is None else self.driver.observe():
            row, norm = self._losses_and_gradients(k, lr)
        nn.utils.clip_grads_with_norm_(self.parameters, self.plan.optimisation.clip_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return row

    def _losses_and_gradients(self, k: int, lr: float) -> tuple[dict[str, Any], Tensor]:
        """Compute the gradients of step k; return its metrics, all finite, and the global gradient norm."""
        meter = StepMeter() if self._is_logged(k) else None
        losses = self._accumulate(*self.plan.batch_at(k), meter)
        sum_gradients(self.parameters)
        sum_over_ranks([losses])
        norm = gradient_norm(self.parameters)
        ce_value, aux_value, norm_value = torch.cat([losses, norm.double()[None]]).tolist()
        self._require_finite(k, {"cross-entropy": ce_value, "auxiliary loss": aux_value, "gradient norm": norm_value})
        row = {
            "step": k,
            "ce": ce_value,
            "aux": aux_value,
            "loss": ce_value + aux_value,
            "lr": lr,
            "grad_norm": norm_value,
            **({"gate": 1.0, "scale_target": None} if self.driver is None else self.driver.row()),
        }
        if meter is not None:
            row |= {f"grad_norm_{name}": gradient_norm(group).item() for name, group in self.groups.items()}
            row |= meter.row()
            self._require_finite(k, {name: value for name, value in row.items() if value is not None})
        return row, norm

    def _is_logged(self, k: int) -> bool:
        return k % self.plan.optimisation.log_every == 0 or k == self.plan.steps - 1

    def _accumulate(self, inputs: Tensor, targets: Tensor, meter: StepMeter | None) -> Tensor:
        """Accumulate this rank's part of the means over the whole batch (B, T), micro-batch by micro-batch.

        Returns (CE, weighted auxiliary loss), (2,) float64. The gradients of their sum are left in the parameters.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        batch = len(inputs)
        inputs, targets = share_of(inputs), share_of(targets)
        rows = self.plan.hardware.micro_batch or len(inputs)
        for number, (some, theirs) in enumerate(zip(inputs.split(rows), targets.split(rows), strict=True)):
            if number > 0:
                stop_if_asked()
            share = len(some) / batch
            some, theirs = (part.to(self.device, non_blocking=True) for part in (some, theirs))
            with self._precision():
                ce, aux, hidden = self.loss(self.model, self.driver, some, theirs)
            ((ce + aux) * share).backward()
            sums += torch.stack([ce.detach(), aux.detach()]) * share
            if meter is not None:
                with self._precision():
                    logits = logits_by_chunk(output_head(self.model), hidden)
                    meter.add(share, logits, self.probe.scale(self.final_norm))
        return sums

    def _precision(self) -> torch.autocast:
        bf16 = self.plan.optimisation.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    def _timed_step(self, k: int) -> dict[str, Any]:
        began = time.perf_counter()
        row = self.step(k)
        took = time.perf_counter() - began
        self.elapsed_s += took
        return row | {"tokens_per_s": self.plan.tokens_per_step / took, "elapsed_s": self.elapsed_s}

    def _metrics(self, start: int) -> MetricsFile | NoMetrics:
        if not leads():
            return NoMetrics()
        path = self.plan.folder / "metrics.jsonl"
        return MetricsFile(path, keep_bytes=self._metrics_bytes, events=self.plan.events, step=start)

    def _validate(self, k: int, metrics: MetricsFile | NoMetrics) -> None:
        every = self.plan.optimisation.eval_every
        if not every or (k + 1) % every:
            return
        try:
            row = self._score(k).row()
        except Stopped:
            self._unvalidated = True
            self._checkpoint(k + 1, metrics, now=True)
            raise
        self._unvalidated = False
        metrics.write({"step": k, **row, "elapsed_s": self.elapsed_s})

    def _score(self, k: int) -> Evaluation:
        score = self.plan.validate()
        last = k == self.plan.steps - 1
        self._require_finite(
            k,
            {"validation cross-entropy": score.ce},
            then="it was the last step, and nothing is published" if last else "stopped before another update",
        )
        return score

    def _checkpoint(self, done: int, metrics: MetricsFile | NoMetrics, *, now: bool) -> None:
        if now or self._is_kept(done):
            self._metrics_bytes = metrics.sync()
            from_leader(lambda: self.checkpoints.save(done, self._state()))  # all ranks wait until it is written

    def _is_kept(self, done: int) -> bool:
        return done % self.plan.hardware.checkpoint_every == 0 or done == self.plan.steps

    def _drop_step(self, k: int, metrics: MetricsFile | NoMetrics) -> None:
        """Drop the gradients of the unfinished step k, and write a checkpoint of the state before it."""
        self.optimizer.zero_grad()
        if not self._is_kept(k):
            self._checkpoint(k, metrics, now=True)

    def _after_divergence(self, k: int, metrics: MetricsFile | NoMetrics, error: Diverged) -> Diverged:
        """Write a checkpoint before step k if the weights are finite; return the error, with the salvage message."""
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters):
            return error
        if not self._is_kept(k):
            self._checkpoint(k, metrics, now=True)
        if self.plan.salvage is None or not (kept := self.plan.salvage(k)):
            return error
        marker = {**read_json(self._marker), "message": f"{error}. {kept}"}
        from_leader(lambda: write_json(self._marker, marker))
        return Diverged(marker["message"])

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "driver": None if self.driver is None else self.driver.state_dict(),
            "elapsed_s": self.elapsed_s,
            "metrics_bytes": self._metrics_bytes,
            "unvalidated": self._unvalidated,
        }

    def _resume(self) -> int:
        """Load the newest checkpoint if there is one, and return the number of steps already done."""
        found = from_leader(self.checkpoints.latest)
        if found is None:
            return 0
        step, state = self.checkpoints.load(found)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.driver is not None:
            self.driver.load_state_dict(state["driver"])
        self.elapsed_s, self._metrics_bytes = state["elapsed_s"], state["metrics_bytes"]
        self._unvalidated = state.get("unvalidated", False)  # checkpoints of earlier versions lack the key
        if leads():
            print(f"{self.plan.label}: resuming after step {step} of {self.plan.steps}", file=sys.stderr)
        return step

    def _tell_of_explosion(self, row: dict[str, Any]) -> None:
        """Warn once if the loss is far above that of uniform guessing; training continues, as most spikes pass."""
        guessing = math.log(vocabulary_of(self.model))
        if not self._exploded and row["ce"] > _EXPLODED * guessing:
            self._exploded = True
            if leads():
                print(
                    f"{self.plan.label}: step {row['step']} has a cross-entropy of {row['ce']:.4g}; uniform guessing "
                    f"has {guessing:.3g}. Training continues. If the loss stays high, {self.plan.remedy}",
                    file=sys.stderr,
                )

    def _refuse_known_divergence(self) -> None:
        if self._marker.exists() and (known := read_json(self._marker))["fingerprint"] == self.plan.fingerprint:
            raise Diverged(known["message"])

    def _require_finite(self, k: int, values: dict[str, float], *, then: str = "stopped before another update") -> None:
        bad = next((name for name, value in values.items() if not math.isfinite(value)), None)
        if bad is None:
            return
        bad = f"the {bad}"
        for name, parameter in self.model.named_parameters():
            if bad == "the gradient norm" and parameter.grad is not None and not parameter.grad.isfinite().all():
                bad = f"the gradient of {name}"
        message = (
            f"{self.plan.label}: {bad} is not finite at step {k}; {then}{self._where_it_broke(k)}. The last good "
            f"state stays in {self.plan.folder}. The same run would diverge again and is refused: {self.plan.remedy}, "
            f"or delete {self._marker} to run it again"
        )
        marker = {"fingerprint": self.plan.fingerprint, "step": k, "tensor": bad, "message": message}
        from_leader(lambda: write_json(self._marker, marker))
        raise Diverged(message)

    def _where_it_broke(self, k: int) -> str:
        """Repeat the forward passes of step k and describe the first overflow; empty if all values are finite."""
        seed_dropout(self.plan.seed, k, rank())
        inputs, _ = self.plan.batch_at(k)
        gate = "" if self.driver is None or "gate" not in (row := self.driver.row()) else f" (gate {row['gate']:.3g})"
        for some in inputs.split(self.plan.hardware.micro_batch or len(inputs)):
            with self._precision():
                if (overflow := find_overflow(self.model, some.to(self.device))) is not None:
                    return f"; {overflow}{gate}"
        return ""
