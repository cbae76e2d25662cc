"""Finished models on odd inputs: whether one without norms blows up where its Baseline does not.

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
WORST = 3  # rows that are named


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
        models: name -> folder of a saved decoder; the names are the job's. One that diverged has no score.
        tokens: token streams that the models were trained on.
        texts: name -> blocks of the text; the names are the job's.
        batch: rows per forward pass; no number depends on it but for rounding.

    Raises:
        UserError: models or texts are not the job's, do not fit one another, or lack a file; the Baseline diverged.
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
    """(n, T) float64 on the CPU: cross-entropy of each id of rows (n, T+1) but the first, in nats, given those before.

    Runs in the model's own dtype, losses in `dtype` or wider. The model is in eval mode for the pass, and nothing of
    it changes. What is not a number, or infinite, is returned as it is.
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
    """What `model` makes of rows (n, T+1): its losses from position `first` on and how far its numbers go.

    Rows longer than the context are read with rotary positions that go on as they began.

    Returns:
        finite: whether every logit is a number; mean and largest cross-entropy of a token, in nats; largest absolute
        logit, and largest absolute value of the residual stream before any norm or what stands in its place. The last
        four are null where a logit is not finite.
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
    """The largest absolute logit, and input of every norm's place, filled as the model runs."""
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
    """Statistics of one model's losses (n, T) in one part of an odd input, and of its rows against the Baseline's."""
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
    """Mean, median, 99.9th percentile and maximum of losses (m,), and how many are not finite.

    One that is not finite counts as worse than any number: it leaves no mean and no maximum (None), and a quantile only
    where it does not reach that far.
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
    """Losses of rows (n,) against the Baseline's on the same ones: excess in nats, and how many blow up on one side.

    `guess` is the loss of a uniform guess. Rows that the Baseline itself loses have no excess.
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
    """How many rows have more than `TIMES` the loss that they have in `reference`, and more than a guess; or lost it.

    The second condition is for rows that are almost free of loss: twice nothing is no failure.
    """
    larger = (rows > TIMES * reference) & (rows > guess)
    return int((larger | (~rows.isfinite() & reference.isfinite())).sum())


def _diverged(folder: Path) -> bool:
    """Whether the run there left a result that says so, and no model."""
    result = folder / "result.json"
    return result.is_file() and "diverged" in read_json(result)


def _number(value: Tensor | float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _require_names(what: str, given: Mapping[str, Path], wanted: Iterable[str]) -> None:
    wanted = list(wanted)
    if given.keys() != set(wanted):
        raise UserError(
            f"the job names the {what} {', '.join(wanted) or '(none)'}, and given were {', '.join(given) or 'none'}: "
            "give the same"
        )


def _open(folder: Path, job: RobustnessJob, coder: Coder, tokenizer: Path) -> Decoder:
    """The model of a job, in float32, able to take the longest rows."""
    model = load(folder, Decoder).float()
    require_vocabulary(vocabulary_of(model), {"vocab_size": coder.vocab_size}, tokenizer)
    found = (model.config.d_model, model.config.context)
    if found != (job.d_model, job.context):
        raise UserError(
            f"the model in {folder} has d_model {found[0]} and context {found[1]}, and the job says {job.d_model} and"
            f" {job.context}: give the models that it means"
        )
    lengthen(model, job.robustness.lengths[-1])
    return model
