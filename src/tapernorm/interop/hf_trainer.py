"""A taper inside the Trainer of transformers.

    taper = attach(model, final=True, schedule=GateSchedule(start=50, end=350), anchor_weight=0.1)
    callback = TaperCallback(taper)
    Trainer(model, arguments, train_dataset=rows, callbacks=[callback], compute_loss_func=callback.loss)

A callback alone cannot add to the loss: `compute_loss_func` is the Trainer's own hook for that, and `loss` fills it.
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

_STATE = "taper.pt"  # in a checkpoint's folder: what the model's own weights do not hold
_IGNORED = -100


class TaperCallback(TrainerCallback):
    """Moves the gate, collects statistics over all micro-batches of a step, and keeps the taper's state in checkpoints.

    The gate follows `state.global_step`; at the end of training it stands where the schedule has it after the last
    step. Checkpoints of the Trainer hold the taper, and `resume_from_checkpoint` brings it back.
    """

    def __init__(self, taper: Taper) -> None:
        if taper.schedule is None:
            raise UserError("TaperCallback needs a schedule: attach(model, schedule=GateSchedule(start, end))")
        self.taper = taper
        self._step = ExitStack()  # open from the start of a step to its last backward pass
        self._in_step = False
        self._counts_targets = True

    def loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Next-token cross-entropy plus the scale loss, as the Trainer's `compute_loss_func`.

        Args:
            outputs: of the model; logits (B, T, V).
            labels: (B, T); -100 is no target.
            num_items_in_batch: labels of the whole optimizer step, over all its micro-batches, as the Trainer counts
                them; a micro-batch counts by its share of them. None: this batch is the step.
        """
        targets = labels[:, 1:]
        logits = outputs.logits[:, :-1].float()
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum")
        loss = total / (targets != _IGNORED).sum().clamp(min=1)
        if self._in_step:  # not in an evaluation: the scale loss is no part of its score
            loss = loss + self.taper.anchor_loss()
        if num_items_in_batch is None:
            return loss
        counted = targets if self._counts_targets else labels
        return loss * ((counted != _IGNORED).sum() / num_items_in_batch)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Refuse an optimizer that lacks a tapered norm's parameters; on a resume, bring the taper's state back."""
        if kwargs.get("optimizer") is not None:
            self.taper.check(kwargs["optimizer"])
        # A class that does not name its loss, such as GPT-2, has its rows' first labels counted as well.
        self._counts_targets = getattr(kwargs.get("model"), "loss_type", None) == "ForCausalLM"
        if self.taper.schedule is not None and self.taper.schedule.end > state.max_steps:
            raise UserError(
                f"the gate reaches 0 at step {self.taper.schedule.end} and training ends at {state.max_steps}: "
                "end the schedule earlier, or train longer"
            )
        if state.global_step > 0:
            path = _checkpoint(args, state) / _STATE
            if not path.is_file():
                raise UserError(f"cannot resume the taper: {path} is missing; resume from a checkpoint in output_dir")
            self.taper.load_state_dict(torch.load(path, weights_only=True))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Set the gate of this optimizer step and start to observe."""
        self._step.close()
        self.taper.set_step(state.global_step)
        self._step.enter_context(self.taper.observe())
        self._in_step = True

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """All micro-batches have run: update the statistics, once."""
        self._in_step = False
        self._step.close()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Put the taper's state beside the weights of a checkpoint."""
        if state.is_world_process_zero:
            with whole_file(_checkpoint(args, state) / _STATE) as temporary:
                torch.save(self.taper.state_dict(), temporary)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """The gate's place after the last step."""
        self.taper.set_step(state.global_step)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
