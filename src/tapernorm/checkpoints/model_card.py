"""The model card of an export: what it is, how to load it, its losses before and after, and its origin."""

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

    model = AutoModelForCausalLM.from_pretrained("this folder")  # needs no remote code""",
    "normfree": """\
    import tapernorm

    model = tapernorm.load("this folder")  # float32; runs the self-check""",
}
_ABOUT = {
    "stock": (
        "Every norm is still in the graph but does not normalise. The config's eps is {eps:.17g}, far above any mean "
        "square, so that each norm divides by the constant {root:.17g}. Its gain is that constant times the trained "
        "scale. **Keep the eps in config.json**: with another value the model is broken. Use float32 or bfloat16. "
        "In float16 the gains overflow."
    ),
    "normfree": "The tapered norms are gone from the graph: each was folded into the linear maps that it fed.",
    "unfused": "Each tapered norm is now a module that computes a fixed linear map. It uses no per-token scale.",
}
_COLUMNS = (
    ("CE", "mean", "rows"),
    ("trimmed mean", "trimmed_mean", "rows"),
    ("worst row", "max", "rows"),
    ("99.9 % of tokens below", "p99_9", "tokens"),
)


@dataclass(frozen=True)
class Story:
    """Origin, training and losses of an exported model.

    Attributes:
        base: hub name or folder of the model that was tapered.
        base_commit: revision of the base on the hub, or None.
        licence: licence of the base, or None if it states none.
        data: description of the training text.
        steps: number of optimizer steps.
        scores: corpus -> "before" and "after" -> statistics of its losses, with `bits_per_byte`.
        settings: all settings of the run.
        commit: commit of the code that trained the model, or None.
        seen: corpus -> number of its distinct documents (`of`) and of those seen in training (`documents`). Corpora
            without such documents are absent.
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
    """Return README.md of an export that loads as `exported` and stores its weights as `dtype`."""
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
    kept = kept_norms(exported, ()) if form == "normfree" else []  # no norm of the stock form normalises
    gone = [name for name in architecture_of(exported).norms(exported) if name not in kept]
    made = f", made from {story.base}" if story is not None else ""
    about = _ABOUT["unfused" if any(isinstance(module, FixedScale) for module in exported.modules()) else form]
    size = f"{parameter_count(exported):,} parameters in {str(dtype).removeprefix('torch.')}"
    yield f"# A {type(exported).__name__} without {'any norm' if not kept else 'most of its norms'}"
    yield f"{size}{made}. {about.format(eps=EPS, root=EPS**0.5)}"
    yield f"- tapered ({len(gone)}): {_listed(gone)}\n- kept ({len(kept)}): {_listed(kept)}"
    yield _LOAD[form]
    yield "`tapernorm export --check FOLDER` runs the self-check: the sha256 of each file, and logits of fixed tokens."


def _rest(story: Story | None) -> Iterator[str]:
    if story is None:
        yield "Its training and its losses were not recorded."
        return
    yield "## Losses before and after"
    yield from _losses(story.scores, story.seen)
    yield "## How it was made"
    yield (
        f"- base: {story.base}{f' at {story.base_commit}' if story.base_commit else ''}\n"
        f"- licence of the base: {story.licence or 'not stated in its folder; look it up before you share the model'}\n"
        f"- data: {story.data}\n"
        f"- {story.steps:,} optimizer steps\n"
        f"- trained by tapernorm at commit {story.commit or 'unknown'}, exported at {code_commit() or 'unknown'}"
    )
    yield "    " + json.dumps(story.settings, ensure_ascii=False)


def _losses(scores: Mapping[str, Mapping[str, Any]], seen: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    if not scores:
        yield "Not measured."
        return
    yield "Held-out text, in nats/token. CE: mean over all targets. Trimmed mean: without 2.5 % of rows at each end."
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
        yield f"**{corpus} was seen in training: {documents} of its {count} documents.** It is not held out."


def worse_than_guessing(scores: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a warning for each corpus on which the model is worse than a uniform guess over the vocabulary."""
    for corpus, forms in scores.items():
        mean, uniform = forms["after"]["rows"]["mean"], forms["after"].get("uniform")
        if uniform is not None and (mean is None or mean > uniform):
            shown = "not finite" if mean is None else f"{mean:.2f} nats/token"
            yield (
                f"{corpus}: WORSE THAN A UNIFORM GUESS OVER THE VOCABULARY: {shown}, and the guess costs "
                f"{uniform:.2f}. This model is broken. Do not use it."
            )


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
