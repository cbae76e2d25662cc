"""One evaluation: a model in each of its forms, on every corpus, row by row (method.md section 11)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapernorm.architectures import context_of, vocabulary_of
from tapernorm.checkpoints.store import load
from tapernorm.models.decoder import parameter_count
from tapernorm.util.atomic_files import read_json, sha256_of, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json, digest
from tapernorm.util.provenance import provenance

from ..config.jobs import EvaluateJob
from ..data.blocks import Blocks
from ..data.manifest import origin_of
from ..data.tokenizers import Coder, open_tokenizer
from ..training.device import take_device
from ..training.run_folder import require_vocabulary
from .row_losses import score_rows

SCHEMA_VERSION = 1
GATED, FUSED = "gated", "fused"  # gated: as trained, in its final state; fused: norms folded into the linear maps
SPLIT = "valid"


def evaluate_model(
    job: EvaluateJob,
    forms: Mapping[str, Path],
    corpora: Mapping[str, Path],
    tokenizer: Path,
    out: Path,
    *,
    device: str,
    threads: int,
    batch: int,
) -> dict[str, Any]:
    """Score the models in `forms` on the validation blocks of `corpora`, write the statistics to `out`, return them.

    Args:
        forms: "gated" and, if there is a folded model, "fused" -> folder of the saved model.
        corpora: name -> folder of blocks; the names are those of the job.
        batch: rows per forward pass; it changes numbers only by rounding.

    Raises:
        UserError: the job names other corpora, or a file is missing. The blocks have another tokenizer or vocabulary
            than the model, or a longer context.
    """
    _require_forms(forms)
    _require_folded_from(forms)
    _require_names(job, corpora)
    chosen = take_device(device, threads)
    coder = open_tokenizer(tokenizer)
    blocks = {name: Blocks.open(folder, SPLIT) for name, folder in corpora.items()}
    for name, opened in blocks.items():
        _require_tokenizer(opened, corpora[name], coder, tokenizer)
    entries = {name: _entry(job, name, opened, coder) for name, opened in blocks.items()}
    parameters = 0
    for form, folder in forms.items():
        model = load(folder).float().to(chosen)
        parameters = parameters or parameter_count(model)
        for name, opened in blocks.items():
            _require_fit(model, folder, opened, corpora[name])
            entries[name]["forms"][form] = _statistics(model, opened, coder, batch=batch, device=chosen)
        del model  # before the next one is loaded
    result = {
        "schema_version": SCHEMA_VERSION,
        "kind": "evaluate",
        "job": job.model_dump(mode="json"),
        "parameters": parameters,
        "corpora": entries,
        "provenance": provenance(
            config_hash=digest(canonical_json(job)),
            weights_sha256={form: sha256_of(folder / "model.safetensors") for form, folder in forms.items()},
            device=torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else "cpu",
            seed=job.model.seed,
        ),
    }
    write_json(out, result)
    return result


def _entry(job: EvaluateJob, name: str, blocks: Blocks, coder: Coder) -> dict[str, Any]:
    """Return the entries on a corpus that do not depend on a model."""
    rows, context = blocks.rows.shape
    return {
        "label": job.labels[name],
        "column": job.columns[name],
        "rows": rows,
        "targets": rows * (context - 1),
        "bytes": target_bytes(blocks, coder),
        "context": context,
        "vocab_size": coder.vocab_size,
        "tokenizer_sha256": blocks.manifest["tokenizer_sha256"],
        "blocks_sha256": blocks.split["sha256"],
        "origin": origin_of(blocks.manifest),
        "forms": {},
    }


def target_bytes(blocks: Blocks, coder: Coder) -> int:
    """Return the UTF-8 bytes of the text of all targets.

    The end of a document has no bytes. A character that a row cuts counts as the 3 bytes of U+FFFD.
    """
    return sum(len(coder.decode(row[1:].tolist()).encode()) for row in blocks.rows)


def _statistics(model: nn.Module, blocks: Blocks, coder: Coder, *, batch: int, device: torch.device) -> dict[str, Any]:
    scores = score_rows(model, blocks.rows, batch=batch, device=device)
    worst = [
        {"row": index, "ce": loss, "text": coder.decode(blocks.rows[index].tolist())} for index, loss in scores.worst()
    ]
    return {**scores.statistics(), "worst": worst}


def _require_forms(forms: Mapping[str, Path]) -> None:
    if GATED not in forms or forms.keys() - {GATED, FUSED}:
        raise UserError(f"a model has the forms {GATED} and, where it was folded, {FUSED}; got {', '.join(forms)}")


def _require_folded_from(forms: Mapping[str, Path]) -> None:
    """Raise UserError if the folded model was made from other weights than those of the gated model."""
    told = forms[FUSED].parent / "result.json" if FUSED in forms else None
    if told is not None and told.is_file():
        folded = read_json(told).get("weights_sha256")
        if folded != sha256_of(forms[GATED] / "model.safetensors"):
            raise UserError(f"{forms[FUSED]} was not folded from the weights in {forms[GATED]}: fold them again")


def _require_names(job: EvaluateJob, corpora: Mapping[str, Path]) -> None:
    if not corpora.keys() == job.labels.keys() == job.columns.keys():
        raise UserError(
            f"the job labels the corpora {', '.join(job.labels)}, has columns for {', '.join(job.columns)}, and blocks"
            f" were given of {', '.join(corpora)}: give the same names"
        )


def _require_tokenizer(blocks: Blocks, folder: Path, coder: Coder, tokenizer: Path) -> None:
    if blocks.manifest["tokenizer_sha256"] != coder.manifest["sha256"]:
        raise UserError(
            f"{folder} was not cut with the tokenizer in {tokenizer} (sha256 {blocks.manifest['tokenizer_sha256'][:12]}"
            f" and {coder.manifest['sha256'][:12]}): cut the blocks again, or give their own tokenizer"
        )


def _require_fit(model: nn.Module, folder: Path, blocks: Blocks, corpus: Path) -> None:
    require_vocabulary(vocabulary_of(model), blocks.manifest, corpus)
    if context_of(model) < blocks.manifest["context"]:
        raise UserError(
            f"{folder} takes {context_of(model)} tokens and {corpus} holds rows of {blocks.manifest['context']}: cut"
            " shorter blocks"
        )
