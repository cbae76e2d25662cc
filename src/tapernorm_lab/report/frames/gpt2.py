"""JSON of fine-tunes and evaluations -> three tidy frames: scores, curves and FakeLN's removals."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tapernorm.util.atomic_files import whole_file
from tapernorm.util.errors import UserError

from ...config.gpt2 import METHOD_LABELS
from ..read_json import read_csv, read_document, value_at
from .pretraining import read_metrics

MODEL = ["size", "method", "seed"]  # what tells one model of a run from another; a published model has no seed
SCORE = [*MODEL, "corpus", "form"]
FORMS = ("gated", "fused")  # as trained, at its end state; norms folded away

_STATISTICS = {
    "rows": ("mean", "median", "trimmed_mean", "p99_9", "max", "std", "nonfinite"),
    "tokens": ("mean", "median", "p99_9"),
}
# Column of the scores -> where the evaluation holds it, the same for every row of it.
_FACTS = {
    "size": "job.model.size",
    "method": "job.model.method",
    "seed": "job.model.seed",  # null for a model as published
    "kind": "job.model.kind",
    "parameters": "parameters",
    "base": "job.model.base",
    "device": "provenance.device",
    "config_hash": "provenance.config_hash",
    "commit": "provenance.commit",  # null outside git
    "torch": "provenance.packages.torch",
}
_CORPUS = (
    "label",
    "column",
    "rows",
    "targets",
    "bytes",
    "context",
    "vocab_size",
    "tokenizer_sha256",
    "blocks_sha256",
    "origin",
)
# What the fine-tune behind an evaluation adds; absent for a model that was not fine-tuned here.
_FINETUNE = {
    "steps": "job.steps",
    "lr": "job.lr",
    "batch": "job.batch",
    "aux_weight": "job.aux_weight",
    "train_tokens": "values.train_tokens",
    "train_time_s": "values.train_time_s",
    "tokens_per_s": "values.tokens_per_s",
    "peak_mem_bytes": "values.peak_mem_bytes",
    "data_hash": "data_hash",  # of base model and blocks
    "finetune_valid_ce": "values.valid_ce",  # nats/token, as the trainer scored it
    "finetune_config_hash": "provenance.config_hash",
    "finetune_commit": "provenance.commit",
    "finetune_torch": "provenance.packages.torch",
}
_FRAMES = {"scores": "scores.csv", "curves": "curves.csv", "removals": "removals.csv"}
_TEXT = (
    *("run", "size", "method", "kind", "corpus", "form", "label", "column", "tokenizer_sha256", "blocks_sha256"),
    *("origin", "base", "data_hash"),
    *(
        "worst_text",
        "device",
        "config_hash",
        "commit",
        "finetune_config_hash",
        "finetune_commit",
        "site",
        "torch",
        "finetune_torch",
    ),
)
_INTEGERS = (
    "seed",
    "rows",
    "targets",
    "bytes",
    "context",
    "vocab_size",
    "rows_nonfinite",
    "worst_row",
    "steps",
    "parameters",
)
_TYPES: dict[Any, Any] = dict.fromkeys(_TEXT, "str") | dict.fromkeys((*_INTEGERS, "batch", "step"), "Int64")
_BEGINNING = 48  # characters of a row's text
_PLAIN = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "…": "...", "\u00a0": " "})

Row = dict[str, Any]
Model = tuple[Any, ...]


@dataclass(frozen=True)
class Gpt2Rows:
    """What is known of a run's GPT-2 track; sizes stand in order of their parameters."""

    scores: pd.DataFrame  # one row per size, method, seed, corpus and form
    curves: pd.DataFrame  # one row per size, method, seed and logged step of fine-tuning
    removals: pd.DataFrame  # one row per size, seed and site that FakeLN removed: the step


def collect(evaluations: Iterable[Path], finetunes: Iterable[Path], *, run: str) -> Gpt2Rows:
    """Read evaluations, and fine-tunes' `result.json` with the `metrics.jsonl` beside each.

    Raises:
        UserError: a file is missing, damaged or of another schema, two files hold the same model, or an evaluation of
            a fine-tuned model comes without its fine-tune.
    """
    trained = _by_model(finetunes, "finetune", {"size": "job.size", "method": "job.method", "seed": "job.seed"})
    scored = _by_model(evaluations, "evaluate", {key: _FACTS[key] for key in MODEL})
    if not scored:
        raise UserError("no evaluation was given: name at least one, such as results/RUN/evaluate/*/*/*.json")
    order = _order([*_sizes(scored, "parameters"), *_sizes(trained, "values.parameters")])
    scores, curves, removals = [], [], []
    for model in sorted(scored, key=order):
        path, document = scored[model]
        if value_at(document, "job.model.kind", path) == "finetuned" and model not in trained:
            raise UserError(f"{path} scores a fine-tune whose result.json is not given: give both")
        facts = _facts(document, _FACTS, path) | _finetune_facts(trained.get(model))
        scores += [{"run": run, **facts, **row} for row in _score_rows(document, path)]
    for model in sorted(trained, key=order):
        path, document = trained[model]
        named = dict(zip(MODEL, model, strict=True))
        curves += [{"run": run, **named, **line} for line in read_metrics(path.parent / "metrics.jsonl")]
        steps = value_at(document, "removals", path) or {}
        removals += [{"run": run, **named, "site": site, "step": step} for site, step in steps.items()]
    return Gpt2Rows(
        scores=_typed(pd.DataFrame(scores)),
        curves=_typed(pd.DataFrame(curves, columns=_columns(curves, ["run", *MODEL, "step"]))),
        removals=_typed(pd.DataFrame(removals, columns=["run", *MODEL, "site", "step"])),
    )


def write(rows: Gpt2Rows, folder: Path) -> None:
    """Write one CSV per frame, each float in the shortest form that reads back as the same bits."""
    for name, file in _FRAMES.items():
        with whole_file(folder / file) as temporary:
            getattr(rows, name).to_csv(temporary, index=False, lineterminator="\n")


def read(folder: Path) -> Gpt2Rows:
    """Read back what `write` wrote."""
    return Gpt2Rows(**{name: _read_csv(folder / file) for name, file in _FRAMES.items()})


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


def _by_model(paths: Iterable[Path], kind: str, places: Mapping[str, str]) -> dict[Model, tuple[Path, Row]]:
    """Model -> its file and what it holds; each model once."""
    found: dict[Model, tuple[Path, Row]] = {}
    for path in map(Path, paths):
        document = read_document(path, kind)
        facts = _facts(document, places, path)
        if facts["method"] not in METHOD_LABELS:
            raise UserError(f"{path}: method {facts['method']!r} is none of {', '.join(METHOD_LABELS)}")
        model = tuple(facts[key] for key in MODEL)
        if model in found:
            named = ", ".join(f"{key} {value}" for key, value in facts.items())
            raise UserError(f"{path} and {found[model][0]} both hold {named}: give one file per model")
        found[model] = (path, document)
    return found


def _sizes(found: Mapping[Model, tuple[Path, Row]], place: str) -> Iterable[tuple[str, int]]:
    """Each model's size and number of parameters."""
    return ((model[0], value_at(document, place, path)) for model, (path, document) in found.items())


def _order(sizes: Iterable[tuple[str, int]]) -> Callable[[Model], tuple[int, str, int, int]]:
    """Sort key of models: small sizes first, methods as they are listed, then seeds."""
    largest: dict[str, int] = {}
    for size, parameters in sizes:
        largest[size] = max(parameters, largest.get(size, 0))
    methods = list(METHOD_LABELS)
    return lambda model: (largest[model[0]], model[0], methods.index(model[1]), -1 if model[2] is None else model[2])


def _facts(document: Row, places: Mapping[str, str], path: Path) -> Row:
    return {column: value_at(document, place, path) for column, place in places.items()}


def _finetune_facts(trained: tuple[Path, Row] | None) -> Row:
    if trained is None:
        return dict.fromkeys(_FINETUNE)
    path, document = trained
    return _facts(document, _FINETUNE, path)


def _score_rows(document: Row, path: Path) -> Iterable[Row]:
    """One row per corpus and form, in the order that the file has them."""
    corpora: dict[str, Row] = value_at(document, "corpora", path)
    for corpus, entry in corpora.items():
        common = {"corpus": corpus} | _facts(entry, {key: key for key in _CORPUS}, path)
        forms: dict[str, Row] = value_at(entry, "forms", path)
        for form, found in forms.items():
            row = {**common, "form": form}
            for over, names in _STATISTICS.items():
                row |= {f"{over}_{name}": value_at(found, f"{over}.{name}", path) for name in names}
            row["bits_per_byte"] = _bits_per_byte(row)
            yield row | _worst(value_at(found, "worst", path))


def _bits_per_byte(row: Row) -> float | None:
    """Total bits over the bytes of the targets' text: comparable across tokenizers."""
    return None if row["rows_mean"] is None else row["rows_mean"] * row["targets"] / math.log(2) / row["bytes"]


def _worst(entries: Sequence[Row]) -> Row:
    worst = entries[0]
    return {"worst_row": worst["row"], "worst_ce": worst["ce"], "worst_text": printable(worst["text"])}


def _columns(rows: Sequence[Row], least: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*least, *(key for row in rows for key in row)]))


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Text as text, counts as integers that may be missing, all else as numbers: as `read` gives them back."""
    return frame.astype({column: _TYPES.get(column, "float64") for column in frame.columns})


def _read_csv(path: Path) -> pd.DataFrame:
    return read_csv(path, ["run"], text=_TEXT, verb="rows", typed=_typed)
