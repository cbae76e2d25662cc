"""The model card of an export: what it is, how to load it, what it lost, and where it comes from."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..architectures import architecture_of, kept_norms
from ..models.decoder import parameter_count
from ..norms import FixedScale
from ..util.provenance import code_commit
from .stock_form import EPS

_LOAD = {
    "stock": """\
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("this folder")  # no remote code""",
    "normfree": """\
    import tapernorm

    model = tapernorm.load("this folder")  # float32; makes the self-check""",
}
_ABOUT = {
    "stock": (
        "Every norm is still in the graph and normalises nothing: the config's eps is {eps:.17g}, far above any mean "
        "square, so that each divides by the constant {root:.17g}, and its gain holds that constant times the trained "
        "scale. **The eps lives in config.json**: with another one this model is broken. Use float32 or bfloat16; in "
        "float16 the gains overflow."
    ),
    "normfree": "The tapered norms are gone from the graph: each was folded into the linear maps behind it.",
    "unfused": "Each tapered norm is a fixed linear map now, a module of its own: it divides by no scale of a token.",
}
_COLUMNS = (
    ("CE", "mean", "rows"),
    ("trimmed mean", "trimmed_mean", "rows"),
    ("worst row", "max", "rows"),
    ("99.9 % of tokens below", "p99_9", "tokens"),
)


@dataclass(frozen=True)
class Story:
    """Where an exported model comes from, and what it lost.

    Attributes:
        base: hub name or folder of the model that was tapered.
        data: the text that it was trained on, in words.
        scores: corpus -> "before" and "after" -> statistics of `rowscore`, with `bits_per_byte`.
        settings: exactly the settings of the run.
        commit: of the code that trained it.
        seen: corpus -> how many `documents` of its `of` distinct ones were trained on; only where some were.
    """

    base: str
    base_commit: str | None
    licence: str | None
    data: str
    steps: int
    scores: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]
    commit: str | None
    seen: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def render(form: str, exported: nn.Module, dtype: torch.dtype, story: Story | None) -> str:
    """README.md of an export that loads as the model `exported`, its weights stored as `dtype`."""
    paragraphs = [*_what(form, exported, dtype, story), *_rest(story)]
    return _header(form, story) + "\n\n".join(paragraphs) + "\n"


def _header(form: str, story: Story | None) -> str:
    says = {
        "license": story and story.licence,
        "base_model": story and story.base_commit and story.base,
        "library_name": "transformers" if form == "stock" else "tapernorm",
        "pipeline_tag": "text-generation",
        "tags": "[tapernorm]",
    }
    return "".join(["---\n", *(f"{key}: {value}\n" for key, value in says.items() if value), "---\n"])


def _what(form: str, exported: nn.Module, dtype: torch.dtype, story: Story | None) -> Iterator[str]:
    kept = kept_norms(exported, ()) if form == "normfree" else []  # a stock form has none that works
    gone = [name for name in architecture_of(exported).norms(exported) if name not in kept]
    made = f", made from {story.base}" if story is not None else ""
    about = _ABOUT["unfused" if any(isinstance(module, FixedScale) for module in exported.modules()) else form]
    size = f"{parameter_count(exported):,} parameters in {str(dtype).removeprefix('torch.')}"
    yield f"# A {type(exported).__name__} without {'any norm' if not kept else 'most of its norms'}"
    yield f"{size}{made}. {about.format(eps=EPS, root=EPS**0.5)}"
    yield f"- tapered ({len(gone)}): {_listed(gone)}\n- kept ({len(kept)}): {_listed(kept)}"
    yield _LOAD[form]
    yield "`tapernorm export --check FOLDER` makes the self-check: files by their sha256, logits of fixed tokens."


def _rest(story: Story | None) -> Iterator[str]:
    if story is None:
        yield "Nothing is recorded here of its training and its losses."
        return
    yield "## What it lost"
    yield from _losses(story.scores, story.seen)
    yield "## How it was made"
    yield (
        f"- base: {story.base}{f' at {story.base_commit}' if story.base_commit else ''}\n"
        f"- licence of the base: {story.licence or 'not stated in its folder; look it up before you share this'}\n"
        f"- data: {story.data}\n"
        f"- {story.steps:,} optimizer steps\n"
        f"- trained by tapernorm at commit {story.commit or 'unknown'}, exported at {code_commit() or 'unknown'}"
    )
    yield "    " + json.dumps(story.settings, ensure_ascii=False)


def _losses(scores: Mapping[str, Mapping[str, Any]], seen: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    if not scores:
        yield "Not measured."
        return
    yield "Held-out text, nats/token (CE: mean over all targets; trimmed: without the 2.5 % of rows at either end)."
    table = ["| corpus | model | bits/byte | " + " | ".join(title for title, _, _ in _COLUMNS) + " | rows not finite |"]
    table.append("| :-- | :-- |" + " --: |" * (2 + len(_COLUMNS)))
    for corpus, forms in scores.items():
        for form, statistics in forms.items():
            values = [statistics["bits_per_byte"], *(statistics[unit][key] for _, key, unit in _COLUMNS)]
            shown = " | ".join("not finite" if value is None else f"{value:.4f}" for value in values)
            table.append(f"| {corpus} | {form} | {shown} | {statistics['rows']['nonfinite']} |")
    yield "\n".join(table)
    for line in worse_than_guessing(scores):
        yield f"**{line}**"
    for corpus in (corpus for corpus in scores if corpus in seen):
        documents, count = seen[corpus]["documents"], seen[corpus]["of"]
        yield f"**{corpus} was seen in training: {documents} of its {count} documents.** It is no held-out text."


def worse_than_guessing(scores: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line, in capitals, for each corpus that the model is worse at than a uniform guess over the vocabulary."""
    for corpus, forms in scores.items():
        mean, uniform = forms["after"]["rows"]["mean"], forms["after"].get("uniform")
        if uniform is not None and (mean is None or mean > uniform):
            shown = "not finite" if mean is None else f"{mean:.2f} nats/token"
            yield (
                f"{corpus}: WORSE THAN A UNIFORM GUESS OVER THE VOCABULARY: {shown}, and guessing costs {uniform:.2f}. "
                "This model is broken; do not use it."
            )


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
