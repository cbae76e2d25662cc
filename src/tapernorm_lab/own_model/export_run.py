"""Export the model in a run folder, with the model card that its files allow."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tapernorm.checkpoints.model_card import Story
from tapernorm.checkpoints.self_check import FormFailed
from tapernorm.checkpoints.store import load
from tapernorm.export import Form, save
from tapernorm.util.atomic_files import read_json

from .own_text import seen_in_training
from .scores import scores_in

EXPORT = "export"
STORY = "story.json"  # beside the last good model of a diverged run: what its result.json would have held


def export_first(run: Path, forms: Sequence[Form]) -> tuple[Form | None, dict[Form, str]]:
    """Export a run in the first of `forms` that passes its check. Return it, and why earlier ones failed."""
    failed: dict[Form, str] = {}
    for form in forms:
        try:
            export_run(run, run / EXPORT, form=form)
        except FormFailed as error:
            failed[form] = str(error)
        else:
            return form, failed
    return None, failed


def export_run(run: Path, folder: Path, *, form: Form, dtype: torch.dtype | None = None) -> None:
    """Export the model in a run folder, with the model card that its files allow.

    Raises:
        UserError: the folder holds no tapered model, or the model does not have that form.
    """
    tokenizer = run / "tokenizer"
    save(
        load(run),
        folder,
        form=form,
        dtype=dtype,
        tokenizer=tokenizer if tokenizer.is_dir() else None,
        story=_story(run),
    )


def _story(run: Path) -> Story | None:
    """Read the model card's facts from a run or its last good model; None if `tapernorm taper` did not make it."""
    path = next((run / name for name in ("result.json", STORY) if (run / name).is_file()), None)
    if path is None or "base" not in (result := read_json(path)):
        return None
    base = result["base"]
    return Story(
        base=base["source"],
        base_commit=base["commit"],
        licence=base["licence"],
        data=base["data"],
        steps=result.get("steps", result["job"]["steps"]),
        scores=scores_in(run),
        seen=seen_in_training(run),
        settings=result["job"],
        commit=result["provenance"]["commit"],
    )
