"""The callback that runs a taper inside the Trainer of transformers.

    taper = attach(model, final=True, schedule=GateSchedule(start=50, end=350), anchor_weight=0.1)
    callback = TaperCallback(taper)
    Trainer(model, arguments, train_dataset=rows, callbacks=[callback], compute_loss_func=callback.loss)

A callback cannot add to the loss. The Trainer's hook for that is `compute_loss_func`, so pass `callback.loss` there.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ..taper import Taper
from ..util.atomic_files import whole_file
from ..util.errors import UserError

_STATE = "taper.pt"  # the taper's state, in a checkpoint's folder
_IGNORED = -100


class TaperCallback(TrainerCallback):
    """Callback that sets the gate, collects statistics over each optimizer step, and checkpoints the taper.

    The gate is g(k) of the schedule at k = `state.global_step`, also after the last step. The Trainer's checkpoints
    contain the taper's state, and `resume_from_checkpoint` restores it.

    Args:
        taper: the taper of the Trainer's model, attached with a schedule.

    Raises:
        UserError: the taper has no schedule.
    """

    def __init__(self, taper: Taper) -> None:
        if taper.schedule is None:
            raise UserError("TaperCallback needs a schedule: attach(model, schedule=GateSchedule(start, end))")
        self.taper = taper
        self._step = ExitStack()  # open from the start of a step to its last backward pass
        self._in_step = False
        self._counts_targets = True

    def loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return next-token cross-entropy plus the scale loss, a scalar. Pass it to the Trainer as `compute_loss_func`.

        An evaluation gets the cross-entropy alone.

        Args:
            outputs: the model's outputs, with logits (B, T, V).
            labels: token ids (B, T). -100 marks a position that is not a target.
            num_items_in_batch: number of labels in all micro-batches of the optimizer step, as the Trainer counts them.
                It weights this micro-batch by its share. None means that the step has one micro-batch.
        """
        targets = labels[:, 1:]
        logits = outputs.logits[:, :-1].float()
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum")
        loss = total / (targets != _IGNORED).sum().clamp(min=1)
        if self._in_step:  # not in an evaluation
            loss = loss + self.taper.anchor_loss()
        if num_items_in_batch is None:
            return loss
        counted = targets if self._counts_targets else labels
        return loss * ((counted != _IGNORED).sum() / num_items_in_batch)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check optimizer and schedule, and restore the taper's state on a resume.

        Raises:
            UserError: the optimizer lacks a parameter of a tapered norm, training ends before the schedule, or the
                checkpoint lacks the taper's state.
        """
        if kwargs.get("optimizer") is not None:
            self.taper.check(kwargs["optimizer"])
        # For a class without a named loss, such as GPT-2, the Trainer counts the first label of each row too.
        self._counts_targets = getattr(kwargs.get("model"), "loss_type", None) == "ForCausalLM"
        if self.taper.schedule is not None and self.taper.schedule.end > state.max_steps:
            raise UserError(
                f"the gate reaches 0 at step {self.taper.schedule.end} and training ends at {state.max_steps}: "
                "lower the schedule's end, or raise max_steps"
            )
        if state.global_step > 0:
            path = _checkpoint(args, state) / _STATE
            if not path.is_file():
                raise UserError(f"cannot resume the taper: {path} is missing; resume from a checkpoint in output_dir")
            self.taper.load_state_dict(torch.load(path, weights_only=True))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Set the gate for this optimizer step and start to collect statistics."""
        self._step.close()
        self.taper.set_step(state.global_step)
        self._step.enter_context(self.taper.observe())
        self._in_step = True

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Update the statistics once, after all micro-batches of the step."""
        self._in_step = False
        self._step.close()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save the taper's state in the checkpoint's folder."""
        if state.is_world_process_zero:
            with whole_file(_checkpoint(args, state) / _STATE) as temporary:
                torch.save(self.taper.state_dict(), temporary)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Set the gate for the step count after the last step."""
        self.taper.set_step(state.global_step)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
