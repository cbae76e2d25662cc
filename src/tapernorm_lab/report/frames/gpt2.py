"""Fine-tunes of GPT-2: from the JSON of trainings and evaluations to scores, curves and FakeLN's removals."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tapernorm.util.errors import UserError

from ...config.gpt2 import METHOD_LABELS
from ..engine.frame import PROVENANCE, Frame, Row, integer, number, text
from ..provenance import linear_kernel
from ..read_json import each_once, value_at
from .pretraining import read_metrics

MODEL = ["size", "method", "seed"]  # columns that identify a model of a run; a published model has no seed
SCORE = [*MODEL, "corpus", "form"]
FORMS = ("gated", "fused")  # as trained, at the end state; folded

_STATISTICS = {
    "rows": ("mean", "median", "trimmed_mean", "p99_9", "max", "std", "nonfinite"),
    "tokens": ("mean", "median", "p99_9"),
}
_NATS = "nats/token"
_CORPUS = {  # of a corpus in an evaluation
    "label": text("label", of="corpus"),
    "column": text("column", of="corpus"),
    "rows": integer("rows", of="corpus"),
    "targets": integer("targets", of="corpus"),
    "bytes": integer("bytes", of="corpus"),
    "context": integer("context", "tokens", of="corpus"),
    "vocab_size": integer("vocab_size", of="corpus"),
    "tokenizer_sha256": text("tokenizer_sha256", of="corpus"),
    "blocks_sha256": text("blocks_sha256", of="corpus"),
    "origin": text("origin", of="corpus"),
}
_FINETUNE = {  # of the fine-tune behind an evaluation; absent for a model that was not fine-tuned here
    "steps": integer("job.steps", of="finetune"),
    "lr": number("job.lr", of="finetune"),
    "batch": integer("job.batch", "blocks", of="finetune"),
    "aux_weight": number("job.aux_weight", of="finetune"),
    "train_tokens": number("values.train_tokens", of="finetune"),
    "train_time_s": number("values.train_time_s", "s", of="finetune"),
    "tokens_per_s": number("values.tokens_per_s", "1/s", of="finetune"),
    "peak_mem_bytes": number("values.peak_mem_bytes", "bytes", of="finetune"),
    "data_hash": text("data_hash", of="finetune"),  # of base model and blocks
    "finetune_valid_ce": number("values.valid_ce", _NATS, of="finetune"),  # as the trainer scored it
    "finetune_config_hash": text("provenance.config_hash", of="finetune"),
    "finetune_commit": text("provenance.commit", of="finetune"),
    "finetune_torch": text("provenance.packages.torch", of="finetune"),
    "finetune_linear": text(),
}
SCORES = Frame(
    file="scores.csv",
    key=("run", *SCORE),
    verb="rows gpt2",
    fields={
        "run": text(),
        "size": text("job.model.size"),
        "method": text("job.model.method"),
        "seed": integer("job.model.seed"),  # null for a model as published
        "kind": text("job.model.kind"),
        "parameters": integer("parameters"),
        "base": text("job.model.base"),
        **PROVENANCE,
        **_FINETUNE,
        "corpus": text(),
        **_CORPUS,
        "form": text(),
        **{f"{over}_{name}": number(unit=_NATS) for over, names in _STATISTICS.items() for name in names},
        "rows_nonfinite": integer(),
        "bits_per_byte": number(),
        "worst_row": integer(),
        "worst_ce": number(unit=_NATS),
        "worst_text": text(),
    },
)
_MODEL = {"run": text(), "size": text("job.size"), "method": text("job.method"), "seed": integer("job.seed")}
CURVES = Frame(file="curves.csv", key=("run", *MODEL, "step"), verb="rows gpt2", fields={**_MODEL, "step": integer()})
REMOVALS = Frame(
    file="removals.csv",
    key=("run", *MODEL, "site"),
    verb="rows gpt2",
    fields={**_MODEL, "site": text(), "step": integer()},
)
FRAMES = {"scores": SCORES, "curves": CURVES, "removals": REMOVALS}
_BEGINNING = 48  # characters of the text of a row to keep
_PLAIN = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "…": "...", "\u00a0": " "})

Model = tuple[Any, ...]


@dataclass(frozen=True)
class Gpt2Rows:
    """The rows of a run's fine-tunes, with sizes in order of their parameters."""

    scores: pd.DataFrame  # one row per size, method, seed, corpus and form
    curves: pd.DataFrame  # one row per size, method, seed and logged step of fine-tuning
    removals: pd.DataFrame  # one row per size, seed and norm that FakeLN removed, with the step


def collect(evaluations: Iterable[Path], finetunes: Iterable[Path], *, run: str) -> Gpt2Rows:
    """Read evaluations, and fine-tunes' `result.json` with the `metrics.jsonl` beside each.

    Raises:
        UserError: a file is missing, damaged or of another schema, two files hold the same model, or an evaluation of
            a fine-tuned model comes without its fine-tune.
    """
    trained = _by_model(finetunes, "finetune", CURVES)
    scored = _by_model(evaluations, "evaluate", SCORES)
    if not scored:
        raise UserError(
            "no RESULT of an evaluation is given: give at least one, such as results/RUN/evaluate/*/*/*.json"
        )
    order = _order({"parameters": scored, "values.parameters": trained})
    scores, curves, removals = [], [], []
    for model in sorted(scored, key=order):
        path, document = scored[model]
        if value_at(document, "job.model.kind", path) == "finetuned" and model not in trained:
            raise UserError(f"{path} scores a fine-tune whose result.json is missing: add it to RESULT")
        tuned = trained.get(model)
        behind = SCORES.facts(tuned[1], tuned[0], of="finetune") if tuned else SCORES.absent("finetune")
        facts = SCORES.facts(document, path) | behind
        facts["finetune_linear"] = linear_kernel(tuned[1]) if tuned else None
        scores += [{"run": run, **facts, **row} for row in _score_rows(document, path)]
    for model in sorted(trained, key=order):
        path, document = trained[model]
        named = dict(zip(MODEL, model, strict=True))
        curves += [{"run": run, **named, **line} for line in read_metrics(path.parent / "metrics.jsonl")]
        steps = value_at(document, "removals", path) or {}
        removals += [{"run": run, **named, "site": site, "step": step} for site, step in steps.items()]
    return Gpt2Rows(scores=SCORES.typed(scores), curves=CURVES.typed(curves), removals=REMOVALS.typed(removals))


def write(rows: Gpt2Rows, folder: Path) -> None:
    """Write one CSV per frame."""
    for name, frame in FRAMES.items():
        frame.write(getattr(rows, name), folder / frame.file)


def read(folder: Path, *, run: str | None = None) -> Gpt2Rows:
    """Read back what `write` wrote. Raises as `Frame.read`."""
    return Gpt2Rows(**{name: frame.read(folder / frame.file, run=run) for name, frame in FRAMES.items()})


def printable(text: str, limit: int = _BEGINNING) -> str:
    """The beginning of a text in printable ASCII: quotes and dashes made plain, the rest escaped as Python does."""
    beginning = ""
    for character in text[:limit].translate(_PLAIN):
        as_is = character.isascii() and character.isprintable() and character != "\\"
        shown = character if as_is else character.encode("unicode_escape").decode()
        if len(beginning) + len(shown) > limit:
            break
        beginning += shown
    return beginning


def _by_model(paths: Iterable[Path], kind: str, frame: Frame) -> dict[Model, tuple[Path, Row]]:
    """Return model -> path and content of its file."""
    found = each_once(paths, [kind], {key: frame.fields[key].place for key in MODEL})
    for (_, method, _), (path, _) in found.items():
        if method not in METHOD_LABELS:
            raise UserError(f"{path} has method {method!r}: give results of {', '.join(METHOD_LABELS)}")
    return found


def _order(found: Mapping[str, Mapping[Model, tuple[Path, Row]]]) -> Callable[[Model], tuple[int, str, int, int]]:
    """Return the sort key of models: parameters, then method in the order of its list, then seed.

    Args:
        found: dotted place of the number of parameters -> the files that hold it there.
    """
    largest: dict[str, int] = {}
    for place, models in found.items():
        for (size, *_), (path, document) in models.items():
            largest[size] = max(value_at(document, place, path), largest.get(size, 0))
    methods = list(METHOD_LABELS)
    return lambda model: (largest[model[0]], model[0], methods.index(model[1]), -1 if model[2] is None else model[2])


def _score_rows(document: Row, path: Path) -> Iterable[Row]:
    """Yield one row per corpus and form, in the order of the file."""
    corpora: dict[str, Row] = value_at(document, "corpora", path)
    for corpus, entry in corpora.items():
        common = {"corpus": corpus} | SCORES.facts(entry, path, of="corpus")
        forms: dict[str, Row] = value_at(entry, "forms", path)
        for form, found in forms.items():
            row = {**common, "form": form}
            for over, names in _STATISTICS.items():
                row |= {f"{over}_{name}": value_at(found, f"{over}.{name}", path) for name in names}
            mean, worst = row["rows_mean"], value_at(found, "worst", path)[0]
            # Total bits over the bytes of the targets' text: comparable across tokenizers.
            row["bits_per_byte"] = None if mean is None else mean * row["targets"] / math.log(2) / row["bytes"]
            yield row | {
                "worst_row": worst["row"],
                "worst_ce": worst["ce"],
                "worst_text": printable(worst["text"]),
            }
