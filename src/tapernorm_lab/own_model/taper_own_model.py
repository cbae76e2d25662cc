"""The recipe of `tapernorm taper`, from a folder or hub name to an export.

    load -> text into blocks -> train through the gate -> fold -> score before and after -> export

The run folder keeps every intermediate result, so that the same command resumes a stopped run. It holds data/,
tokenizer/, the training (metrics, tapered weights, result.json), scores.json and export/.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tapernorm.checkpoints.pretrained import commit_of, find, licence_of, model_digest, tokenizer_digest
from tapernorm.export import Form
from tapernorm.export import remove as remove_export
from tapernorm.util.atomic_files import sha256_of
from tapernorm.util.hashing import canonical_json

from ..data.manifest import origin_of
from ..training.device import take_device
from ..training.outputs import Work, output_folder
from ..training.run_folder import data_hashes, fingerprint_of
from .export_run import EXPORT, export_first
from .options import HELD_OUT, KIND
from .own_text import prepare, text_digest
from .resolve import TaperRun
from .scores import take_scores
from .train import train


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run of the recipe.

    Attributes:
        scores: text -> "before", "after" -> statistics.
        exported: form of the export; None if nothing was exported.
        failed: form -> why its export failed.
    """

    scores: dict[str, Any]
    exported: Form | None
    failed: dict[Form, str]


def taper_model(run: TaperRun) -> Outcome:
    """Run or resume the recipe.

    Raises:
        UserError: the model, a text or the folder cannot be used, or the training diverged.
    """
    run = replace(run, base=find(run.source))  # downloads the weights, if they are missing
    device = take_device(run.hardware.device, run.hardware.threads)
    facts = {"source": run.source, "commit": commit_of(run.base), "licence": licence_of(run.base)}
    facts |= {"digest": model_digest(run.base)}
    with output_folder(run.out, _work(run, facts["digest"]), overwrite=run.overwrite):
        blocks = prepare(run)
        manifest = blocks[HELD_OUT, "train"].manifest
        facts |= {"data": origin_of(manifest)}
        fingerprint = fingerprint_of(run.job, {**data_hashes(manifest), "base": facts["digest"]})
        earlier = _weights(run.out)
        train(run, facts, blocks, device, fingerprint)
        if earlier != _weights(run.out):
            remove_export(run.out / EXPORT)  # an export of earlier weights
        scores = take_scores(run, blocks, device)
        return Outcome(scores, *export_first(run.out, run.forms))


def _work(run: TaperRun, base_digest: str) -> Work:
    """Return what identifies the output folder of a run: job, base model, training text and tokenizer."""
    text = text_digest(run.texts.corpora[HELD_OUT])
    identity = {"job": run.job.model_dump(mode="json"), "base": base_digest, "text": text}
    identity["tokenizer"] = tokenizer_digest(run.base)
    return Work(KIND, json.loads(canonical_json(identity)))


def _weights(run: Path) -> str | None:
    """Return the sha256 of the weights in a run folder, or None if it has none."""
    path = run / "model.safetensors"
    return sha256_of(path) if path.is_file() else None
