"""Taper a model of one's own, from its folder or hub name to a norm-free export: the whole recipe.

    load -> text into blocks -> fine-tune through the gate -> fold -> score before and after -> export

Everything lies in one folder and is kept, so that the same command goes on where it was stopped:
data/ and tokenizer/, the run itself (metrics, tapered weights, result.json), scores.json and export/.
"""

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapernorm.checkpoints.model_card import Story
from tapernorm.checkpoints.pretrained import (
    commit_of,
    licence_of,
    load_pretrained,
    model_digest,
    tokenizer_digest,
)
from tapernorm.checkpoints.self_check import FormFailed
from tapernorm.checkpoints.store import load
from tapernorm.checkpoints.store import save as save_run
from tapernorm.export import FORMS, Form, save
from tapernorm.export import remove as remove_export
from tapernorm.folding import fold
from tapernorm.norms import TaperNorm
from tapernorm.schedule import GateSchedule
from tapernorm.taper import Taper, attach
from tapernorm.util.atomic_files import (
    discard,
    read_json,
    sha256_of,
    write_json,
)
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json, digest
from tapernorm.util.provenance import code_commit, provenance

from ..config.jobs import FinetuneJob, OwnJob
from ..config.sections import HardwareConfig
from ..data.blocks import Blocks, batch_of
from ..data.manifest import origin_of, read_manifest
from ..data.tokenizers import Coder, open_tokenizer
from ..experiments.evaluate_corpora import target_bytes
from ..experiments.finetune import next_tokens
from ..experiments.row_losses import score_rows
from ..training.device import take_device
from ..training.optimizer import Optimisation
from ..training.outputs import Work, output_folder
from ..training.run_folder import data_hashes, fingerprint_of, train_in
from ..training.trainer import Plan, Trainer
from ..training.validation_loss import Evaluation, evaluate_blocks
from .foresight import LEVEL, look_at
from .options import HELD_OUT, KIND
from .own_text import prepare, seen_in_training, text_digest
from .request import Request, Resolved, resolve

SCORES, EXPORT = "scores.json", "export"
LAST_GOOD = "last-good"  # the model before a divergence, where its norms were gone already
_TOLD = (SCORES, "spread.json", LAST_GOOD)  # of one run's weights
_STORY = "story.json"  # in LAST_GOOD: what result.json would tell of it


@dataclass(frozen=True)
class Outcome:
    """What a run of the recipe came to.

    Attributes:
        scores: corpus -> "before", "after" -> statistics.
        exported: the form that was written; None: none was.
        failed: form -> why it was not written.
    """

    scores: dict[str, Any]
    exported: Form | None
    failed: dict[Form, str]


def taper_model(request: Request) -> Outcome:
    """Run the recipe, or go on with it.

    Raises:
        UserError: the model, the text or the folder cannot be used, or the run diverged; the message holds the remedy.
    """
    found = resolve(request)
    base, outlined, job, hardware = found.base, found.outlined, found.job, found.hardware
    device = take_device(hardware.device, hardware.threads)
    facts = {"source": request.model, "commit": commit_of(base), "licence": licence_of(base)}
    facts |= {"digest": model_digest(base)}
    with output_folder(request.out, _work(request, found, facts["digest"]), overwrite=request.overwrite):
        blocks = prepare(request, base, outlined, job.context)
        manifest = blocks[HELD_OUT, "train"].manifest
        facts |= {"data": origin_of(manifest)}
        fingerprint = fingerprint_of(job, {**data_hashes(manifest), "base": facts["digest"]})
        earlier = _weights(request.out)
        train_in(
            request.out,
            "finetune",
            job,
            fingerprint,
            lambda folder: _trainer(job, hardware, facts, base, blocks, device, request.out, folder, fingerprint),
            lambda trainer: {"base": facts} | _norms(trainer),
            told=_TOLD,
        )
        if earlier != _weights(request.out):
            remove_export(request.out / EXPORT)  # it is of other weights
        scores = _scores(request.out, base, blocks, hardware, device)
        others: list[Form] = [form for form in FORMS if form != found.form]
        return Outcome(scores, *_export_first(request.out, [] if request.keep_norms else [found.form, *others]))


def _work(request: Request, found: Resolved, base_digest: str) -> Work:
    """What the output folder of a request belongs to: its job, its base model and its training text."""
    text = text_digest(found.texts.corpora[HELD_OUT])
    identity = {"job": found.job.model_dump(mode="json"), "base": base_digest, "text": text}
    identity["tokenizer"] = tokenizer_digest(found.base)
    return Work(KIND, json.loads(canonical_json(identity)), _earlier_names(request, found, base_digest, text))


def _earlier_names(request: Request, found: Resolved, base_digest: str, text: str) -> tuple[str, ...]:
    """What an earlier version, which left no mark, called this job: by the blocks in its folder, if of this text."""
    data = request.out / "data" / HELD_OUT
    if not (data / "text.json").is_file() or read_json(data / "text.json").get("text") != text:
        return ()
    hashes = data_hashes(read_manifest(data / "blocks", "blocks")) if (data / "blocks/manifest.json").is_file() else {}
    return (fingerprint_of(found.job, {**hashes, "base": base_digest}),)


def _weights(run: Path) -> str | None:
    """The sha256 of the weights in a run folder; None where there are none."""
    path = run / "model.safetensors"
    return sha256_of(path) if path.is_file() else None


def _export_first(run: Path, forms: Sequence[Form]) -> tuple[Form | None, dict[Form, str]]:
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


def _trainer(
    job: FinetuneJob,
    hardware: HardwareConfig,
    facts: Mapping[str, Any],
    base: Path,
    blocks: Mapping[tuple[str, str], Blocks],
    device: torch.device,
    out: Path,
    folder: Path,
    fingerprint: str,
) -> Trainer:
    train, valid = blocks[HELD_OUT, "train"], blocks[HELD_OUT, "valid"]
    model = load_pretrained(base).to(device).train()
    look = look_at(model, train.rows, open_tokenizer(out / "tokenizer"))
    taper = _taper(model, job)
    if taper is not None:
        for line in look.warnings(taper.swapped, level_weight=taper.level_weight):
            print(line, file=sys.stderr)

    commit = code_commit()  # of what runs here

    def salvage(steps: int) -> str:
        """A model whose norms are gone already is one to fold."""
        if taper is None or taper.gate.item() > 0:
            return ""
        kept = out / LAST_GOOD
        discard(kept)
        save_run(model, kept)
        shutil.copytree(out / "tokenizer", kept / "tokenizer")
        settings = {"job": job.model_dump(mode="json"), "steps": steps}
        write_json(kept / _STORY, {"base": facts, **settings, "provenance": {"commit": commit}})
        return f"Its norms were gone by then: `tapernorm export --model {kept} …` exports the last good model"

    def validate() -> Evaluation:
        return evaluate_blocks(model, valid.rows, batch=hardware.micro_batch or job.batch, device=device)

    plan = Plan(
        label=f"taper seed{job.seed}",
        seed=job.seed,
        steps=job.steps,
        optimisation=Optimisation.of_finetuning(job),
        hardware=hardware,
        batch_at=lambda step: next_tokens(batch_of(train, seed=job.seed, step=step, batch=job.batch)),
        validate=validate,
        tokens_per_step=job.batch * job.context,
        fingerprint=fingerprint,
        folder=folder,
        remedy=remedy_of(job),
        salvage=salvage,
        tolerant=True,  # a few lost rows are among what the scores tell
    )
    return Trainer(model, taper, plan)


def remedy_of(job: FinetuneJob) -> str:
    """What may keep a job like this one from diverging."""
    if job.taper is None:
        return "take a lower --lr"
    level = "a higher --level" if isinstance(job, OwnJob) and job.level_weight else f"--level {LEVEL:g}"
    return f"take a lower --lr, {level}, or --sites without the norms that --dry-run marks"


def _taper(model: nn.Module, job: FinetuneJob) -> Taper | None:
    """The taper that a job asks for; None for a control, whose norms stay."""
    if job.taper is None:
        return None
    return attach(
        model,
        final=job.method == "all_aux",
        schedule=GateSchedule(job.taper.start, job.taper.end),
        ema_rate=job.train.ema_rate,
        anchor_weight=job.aux_weight,
        **({"sites": job.sites, "level_weight": job.level_weight} if isinstance(job, OwnJob) else {}),
    )


def _norms(trainer: Trainer) -> dict[str, Any]:
    driver = trainer.driver
    if driver is None:
        return {"norms": {}, "scale_target": None}
    assert driver.scale_target is not None
    return {
        "norms": {site: {"c": value} for site, value in driver.constants.items()},
        "scale_target": driver.scale_target.item(),
    }


def _scores(
    out: Path, base: Path, blocks: Mapping[tuple[str, str], Blocks], hardware: HardwareConfig, device: torch.device
) -> dict[str, Any]:
    """Statistics of the base model and of the folded one on every text, kept in scores.json."""
    path, weights = out / SCORES, sha256_of(out / "model.safetensors")
    texts = {name: opened for (name, split), opened in blocks.items() if split == "valid"}
    identity = digest([weights, {name: opened.split["sha256"] for name, opened in texts.items()}])
    if (known := _told(path)).get("identity") == identity and "provenance" in known:
        return known["corpora"]
    coder = open_tokenizer(out / "tokenizer")
    makers = {"before": lambda: load_pretrained(base), "after": lambda: _finished(out)}
    corpora: dict[str, Any] = {name: {} for name in texts}
    for form, make in makers.items():
        model = make().to(device)
        for name, opened in texts.items():
            corpora[name][form] = _statistics(model, opened, coder, batch=hardware.micro_batch or 1, device=device)
    told = {"identity": identity, "corpora": corpora, "provenance": provenance(weights_sha256=weights)}
    write_json(path, {"schema_version": 1, "kind": "scores", **told})
    return corpora


def _told(path: Path) -> Mapping[str, Any]:
    """What a file of scores tells; nothing where it is missing or damaged, so that they are taken again."""
    try:
        return read_json(path)
    except (FileNotFoundError, UserError):
        return {}


def _finished(out: Path) -> nn.Module:
    """The trained model, its norms folded if they are gone."""
    model = load(out)
    return fold(model)[0] if any(isinstance(module, TaperNorm) for module in model.modules()) else model


def _statistics(model: nn.Module, blocks: Blocks, coder: Coder, *, batch: int, device: torch.device) -> dict[str, Any]:
    statistics = score_rows(model, blocks.rows, batch=batch, device=device).statistics()
    mean = statistics["rows"]["mean"]
    targets = blocks.rows.shape[0] * (blocks.rows.shape[1] - 1)
    size = target_bytes(blocks, coder)
    bits = None if mean is None or size == 0 else mean * targets / math.log(2) / size
    uniform = math.log(blocks.manifest["vocab_size"])
    return {**statistics, "uniform": uniform, "targets": targets, "bytes": size, "bits_per_byte": bits}


def _story(run: Path) -> Story | None:
    """What the files of a run, or of its last good model, say; None where it was not made by this recipe."""
    path = next((run / name for name in ("result.json", _STORY) if (run / name).is_file()), None)
    if path is None or "base" not in (result := read_json(path)):
        return None
    base = result["base"]
    return Story(
        base=base["source"],
        base_commit=base["commit"],
        licence=base["licence"],
        data=base["data"],
        steps=result.get("steps", result["job"]["steps"]),
        scores=_scores_of(run),
        seen=seen_in_training(run),
        settings=result["job"],
        commit=result["provenance"]["commit"],
    )


def _scores_of(run: Path) -> dict[str, Any]:
    """The scores of the weights that lie in `run`; none where they were not taken, or of other weights."""
    known = _told(run / SCORES)
    weights = known.get("provenance", {}).get("weights_sha256")
    return known["corpora"] if weights == sha256_of(run / "model.safetensors") else {}
