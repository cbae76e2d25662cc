"""Scores of finished models on odd inputs, which show whether a model without norms fails where its Baseline does not.

All models of one width and seed, or of one stage and seed, read the same rows, so that each row's losses can be
compared. n rows, T positions, B rows of a batch, V vocabulary.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapernorm.architectures import architecture_of, vocabulary_of
from tapernorm.checkpoints.store import load
from tapernorm.models.decoder import Decoder, lengthen, parameter_count
from tapernorm.util.atomic_files import read_json, sha256_of, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json, digest
from tapernorm.util.module_modes import evaluating
from tapernorm.util.provenance import provenance

from ...config.odd_inputs import BASELINE, LONGER, TIMES, RobustnessJob
from ...data.tokenizers import Coder, open_tokenizer
from ...training.device import take_device
from ...training.run_folder import require_vocabulary
from ..loss_quantiles import comparable, quantile
from ..row_losses import TAIL
from .rows import OddInput, Part, odd_inputs

SCHEMA_VERSION = 1
WORST = 3  # number of worst rows in a result


def score_models(
    job: RobustnessJob,
    models: Mapping[str, Path],
    tokens: Path,
    tokenizer: Path,
    texts: Mapping[str, Path],
    out: Path,
    *,
    device: str,
    threads: int,
    batch: int,
) -> dict[str, Any]:
    """Score the models of `job` on every odd input, write the statistics to `out`, and return them.

    Args:
        models: name -> folder of a saved decoder; the names are those of the job. A diverged model has no score.
        tokens: token streams that the models were trained on.
        texts: name -> blocks of the text; the names are those of the job.
        batch: rows per forward pass; it changes numbers only by rounding.

    Raises:
        UserError: models or texts are not those of the job, do not fit each other, or lack a file. The Baseline
            diverged.
    """
    _require_names("models", models, job.models)
    _require_names("texts", texts, [text.name for text in job.robustness.texts])
    chosen = take_device(device, threads)
    diverged = [name for name, folder in models.items() if _diverged(folder)]
    if BASELINE in diverged:
        raise UserError(f"the Baseline in {models[BASELINE]} diverged, so nothing can be compared with it")
    coder = open_tokenizer(tokenizer)
    inputs = odd_inputs(job, coder, tokens, texts)
    found: dict[str, Any] = {"models": {}, "diverged": diverged, "scores": [], "positions": {}}
    baseline: dict[str, Tensor] = {}  # odd input -> the Baseline's losses
    for name in sorted((name for name in models if name not in diverged), key=lambda name: name != BASELINE):
        model = _open(models[name], job, coder, tokenizer).to(chosen)
        weights = sha256_of(models[name] / "model.safetensors")
        facts = {"label": job.models[name], "parameters": parameter_count(model), "weights_sha256": weights}
        found["models"][name] = facts
        losses = {odd.name: position_losses(model, odd.rows, batch=batch, device=chosen) for odd in inputs}
        for odd in inputs:
            for part in odd.parts:
                scores = part_scores(losses[odd.name], baseline.get(odd.name), odd, part, coder)
                found["scores"].append({"model": name, "trial": odd.name, "part": part.name, **scores})
        baseline = baseline or losses
        bins = losses[LONGER].mean(dim=0).view(-1, job.robustness.position_bin).mean(dim=1)
        found["positions"][name] = [_number(value) for value in bins]
    device_name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else "cpu"
    result = {
        "schema_version": SCHEMA_VERSION,
        "kind": "robustness",
        "job": job.model_dump(mode="json"),
        "vocab_size": coder.vocab_size,
        "trials": {odd.name: odd.facts() for odd in inputs},
        **found,
        "provenance": provenance(config_hash=digest(canonical_json(job)), device=device_name, seed=job.seed),
    }
    write_json(out, result)
    return result


@torch.no_grad()
def position_losses(
    model: Decoder, rows: Tensor, *, batch: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the cross-entropy in nats of each id but the first of rows (n, T+1): (n, T) float64 on the CPU.

    The model runs in its own dtype and in eval mode, and is not changed. Losses are computed in `dtype` or wider. NaN
    and infinite losses are returned as they are.
    """
    losses = torch.empty(len(rows), rows.shape[1] - 1, dtype=torch.float64)
    with evaluating(model):
        for first in range(0, len(rows), batch):
            ids = rows[first : first + batch].to(device)
            logits = model(ids[:, :-1])  # (B, T, V)
            wide = logits.to(torch.promote_types(logits.dtype, dtype)).transpose(1, 2)
            losses[first : first + len(ids)] = F.cross_entropy(wide, ids[:, 1:], reduction="none").double().cpu()
    return losses


def outcome(model: Decoder, rows: Tensor, *, first: int = 0) -> dict[str, Any]:
    """Score `model` on rows (n, T+1) from position `first` on, and record its largest logit and activation.

    Rotary positions are extended for rows longer than the context.

    Returns:
        `finite`, whether all numbers are finite; mean and largest cross-entropy of a token, in nats; the largest
        absolute logit; the largest absolute input of any norm or of its replacement. The last four are None if one of
        them is not finite.
    """
    if rows.shape[1] - 1 > model.config.context:
        model = copy.deepcopy(model)
        lengthen(model, rows.shape[1] - 1)
    device = model.lm_head.weight.device
    with _largest(model) as largest:
        losses = position_losses(model, rows, batch=len(rows), device=device, dtype=torch.float64)[:, first:]
    numbers = {"ce": losses.mean().item(), "ce_max": losses.max().item()}
    numbers |= {f"{name}_max": max(found) for name, found in largest.items()}
    finite = all(map(math.isfinite, numbers.values()))
    return {"finite": finite, **(numbers if finite else dict.fromkeys(numbers))}


@contextmanager
def _largest(model: Decoder) -> Iterator[dict[str, list[float]]]:
    """Yield lists of the largest absolute logits and norm inputs, which are filled while the model runs."""
    found: dict[str, list[float]] = {"logit": [], "activation": []}

    def before_norm(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        found["activation"].append(args[0].abs().max().item())

    def after_model(_: nn.Module, __: Any, logits: Tensor) -> None:
        found["logit"].append(logits.abs().max().item())

    norms = [model.get_submodule(name) for name in architecture_of(model).norms(model)]
    hooks = [*(norm.register_forward_pre_hook(before_norm) for norm in norms), model.register_forward_hook(after_model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def part_scores(losses: Tensor, reference: Tensor | None, odd: OddInput, part: Part, coder: Coder) -> dict[str, Any]:
    """Return statistics of a model's losses (n, T) in one part of an odd input, alone and against the Baseline's."""
    here = losses[:, part.first : part.last]
    rows = here.mean(dim=1)
    worst = torch.argsort(rows, descending=True, stable=True)[:WORST].tolist()  # NaN first
    read = odd.rows[:, part.first + 1 : part.last + 1]
    beside = None
    if reference is not None:
        theirs = reference[:, part.first : part.last].mean(dim=1)
        beside = beside_baseline(rows, theirs, guess=math.log(coder.vocab_size))
    return {
        "rows": tail(rows),
        "tokens": tail(here.flatten()),
        "beside_baseline": beside,
        "worst": [{"row": i, "ce": _number(rows[i]), "text": coder.decode(read[i].tolist())} for i in worst],
    }


def tail(values: Tensor) -> dict[str, float | int | None]:
    """Return mean, median, 99.9th percentile and maximum of losses (m,), and the number that are not finite.

    A loss that is not finite counts as larger than any number. Mean and maximum are then None, and so is a quantile
    that reaches such a loss.
    """
    ordered = comparable(values).cpu()
    found = {
        "mean": values.mean(),
        "median": quantile(ordered, 0.5),
        "p99_9": quantile(ordered, TAIL),
        "max": ordered.max(),
    }
    return {**{name: _number(value) for name, value in found.items()}, "nonfinite": int((~values.isfinite()).sum())}


def beside_baseline(rows: Tensor, reference: Tensor, *, guess: float) -> dict[str, float | int | None]:
    """Compare losses of rows (n,) with the Baseline's on the same rows: excess in nats, and rows that blow up.

    `guess` is the loss of a uniform guess. Rows on which the Baseline's loss is not finite have no excess.
    """
    excess = torch.where(reference.isfinite(), rows - reference, -math.inf)
    worst = int(torch.argmax(excess))
    return {
        "excess_p99_9": tail(excess)["p99_9"],
        "excess_max": _number(excess[worst]),
        "excess_row": worst,
        "blown": blown(rows, reference, guess=guess),
        "baseline_blown": blown(reference, rows, guess=guess),
    }


def blown(rows: Tensor, reference: Tensor, *, guess: float) -> int:
    """Count the rows whose loss exceeds `TIMES` that in `reference` and also `guess`, or alone is not finite.

    The condition on `guess` excludes rows with almost no loss, for which a ratio means nothing.
    """
    larger = (rows > TIMES * reference) & (rows > guess)
    return int((larger | (~rows.isfinite() & reference.isfinite())).sum())


def _diverged(folder: Path) -> bool:
    """Whether the result in `folder` says that the run diverged."""
    result = folder / "result.json"
    return result.is_file() and "diverged" in read_json(result)


def _number(value: Tensor | float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _require_names(what: str, given: Mapping[str, Path], wanted: Iterable[str]) -> None:
    wanted = list(wanted)
    if given.keys() != set(wanted):
        raise UserError(
            f"the job names the {what} {', '.join(wanted) or '(none)'}, but {', '.join(given) or 'none'} were given: "
            "give the same"
        )


def _open(folder: Path, job: RobustnessJob, coder: Coder, tokenizer: Path) -> Decoder:
    """Load a model of the job in float32, with rotary positions for the longest rows."""
    model = load(folder, Decoder).float()
    require_vocabulary(vocabulary_of(model), {"vocab_size": coder.vocab_size}, tokenizer)
    found = (model.config.d_model, model.config.context)
    if found != (job.d_model, job.context):
        raise UserError(
            f"the model in {folder} has d_model {found[0]} and context {found[1]}, but the job has {job.d_model} and"
            f" {job.context}: give the models of the job"
        )
    lengthen(model, job.robustness.lengths[-1])
    return model
