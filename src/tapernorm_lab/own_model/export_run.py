"""Export the model in a run folder, with all that the folder tells of it."""

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
STORY = "story.json"  # beside the last good model of a run that diverged: what result.json would tell of it


def export_first(run: Path, forms: Sequence[Form]) -> tuple[Form | None, dict[Form, str]]:
    """Export a run in the first of `forms` that computes what the folded model does; why the ones before do not."""
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
    """Export the model in a run folder, with all that the folder tells of it.

    Raises:
        UserError: it holds no tapered model, or one without that form.
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
    """What the files of a run, or of its last good model, say; None where it was not made by this recipe."""
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
