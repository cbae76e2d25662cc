"""The one description of a run: strict, frozen models that config/*.yaml and the JSON schema both follow.

A `Config` describes a whole run. The workflow cuts from it one small *job* per rule (`CorpusJob`,
`PretrainJob`, ...), holding exactly what defines that rule's numbers, so that a change of a setting
reruns what depends on it and nothing else. Hardware is not part of a job.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .errors import UserError

Variant = Literal["baseline", "internal", "internal_aux", "all", "all_aux"]
VARIANTS: tuple[Variant, ...] = ("baseline", "internal", "internal_aux", "all", "all_aux")
VARIANT_LABELS: dict[str, str] = {
    "baseline": "Baseline",
    "internal": "Internal-Taper",
    "internal_aux": "Internal-Taper (+aux)",
    "all": "All-Taper",
    "all_aux": "All-Taper (+aux)",
}

Beta = Annotated[float, Field(ge=0, lt=1)]
PositiveInt = Annotated[int, Field(gt=0)]
Items = TypeVar("Items", bound=Sequence[Any])
Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """Base of every model here: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataConfig(Strict):
    """Which text is read, and how it is split."""

    source: Literal["web", "tinystories", "text"]
    files: tuple[str, ...]  # text: paths or globs of .txt, .jsonl or .parquet files; empty for other sources
    field: str | None  # text: the key of a JSON line, the column of a Parquet file; null for other sources
    valid_fraction: Annotated[float, Field(gt=0, lt=1)] | None  # of documents, by hash; null: TinyStories' own

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        text, own_split = self.source == "text", self.source == "tinystories"
        if text != bool(self.files) or text != (self.field is not None):
            raise ValueError(
                f"data.source is {self.source!r}, data.files {list(self.files)} and data.field {self.field!r}: source "
                "'text' needs both, any other source an empty list and null"
            )
        if own_split != (self.valid_fraction is None):
            raise ValueError(
                f"data.source is {self.source!r} and data.valid_fraction {self.valid_fraction}: it is null for "
                "'tinystories', which keeps its own split, and a fraction for any other source"
            )
        return self


class TokenizerConfig(Strict):
    """SentencePiece, lossless on any text."""

    vocab_size: Annotated[int, Field(ge=260)]  # pieces, the 256 bytes and 2 special ids included
    model_type: Literal["bpe", "unigram"]
    max_documents: PositiveInt | None  # train on this many, drawn by hash over the whole split; null: on all
    literal_u2581: Literal["refuse", "as_space"]  # U+2581 is SentencePiece's own space mark and decodes to a space


class ModelConfig(Strict):
    """The decoder of every width (method.md section 8)."""

    n_layer: PositiveInt
    n_head: PositiveInt
    n_kv_head: PositiveInt
    context: Annotated[int, Field(ge=2)]  # tokens
    norm: Literal["rmsnorm", "layernorm"]
    norm_eps: Annotated[float, Field(gt=0)]
    rope_theta: Annotated[float, Field(gt=0)]
    tie_head: bool


class WidthConfig(Strict):
    """One width of the study, with its own training length and variants."""

    d_model: PositiveInt
    d_ff: PositiveInt  # SwiGLU hidden width
    label: str  # how the paper names the size, or the width itself
    steps: Annotated[int, Field(ge=2)]  # optimizer steps
    variants: tuple[Variant, ...]


class TrainConfig(Strict):
    """Optimisation (section 9) and bookkeeping of a training run."""

    batch: PositiveInt  # windows of `context` tokens per optimizer step
    lr: Annotated[float, Field(gt=0)]  # peak
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)]  # of the steps, linear; then cosine to zero
    betas: tuple[Beta, Beta]
    adam_eps: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)]
    clip_norm: Annotated[float, Field(gt=0)]  # global gradient norm
    precision: Literal["float32", "bf16"]  # bf16: autocast, weights stay float32
    log_every: PositiveInt  # steps
    eval_every: Annotated[int, Field(ge=0)]  # steps; 0: at the end only


class TaperConfig(Strict):
    """Gate, calibration and scale loss (sections 3-5)."""

    start_fraction: Annotated[float, Field(gt=0, lt=1)]  # of the steps
    end_fraction: Annotated[float, Field(gt=0, le=1)]  # of the steps; 1.0 is the paper
    ema_rate: Annotated[float, Field(gt=0, le=1)]  # m
    anchor_weight: Annotated[float, Field(ge=0)]  # lambda of the "+aux" variants

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.end_fraction <= self.start_fraction:
            raise ValueError(
                f"taper.end_fraction ({self.end_fraction}) must lie after taper.start_fraction ({self.start_fraction})"
            )
        return self


class HardwareConfig(Strict):
    """What a job runs on. Never part of a job's identity: changing it reruns nothing."""

    device: Literal["auto", "cpu", "cuda"]
    threads: PositiveInt  # CPU threads of one training job
    compile: bool  # torch.compile of the training step
    micro_batch: PositiveInt | None  # windows per forward pass; null: the whole batch at once
    checkpoint_every: PositiveInt  # steps
    tensorboard: bool  # event files beside the JSON lines


class BenchConfig(Strict):
    """The decoding benchmark (section 11), on the widest Internal-Taper (+aux) model."""

    dtype: Literal["float32", "bfloat16"]
    batches: tuple[PositiveInt, ...]
    prompts: tuple[PositiveInt, ...]  # tokens
    new_tokens: PositiveInt  # decoded after each prompt
    block: PositiveInt  # decode steps between two synchronisations: one sample
    rounds: PositiveInt  # samples of every arm
    warmup: Annotated[int, Field(ge=1)]  # untimed rounds
    threads: PositiveInt  # CPU threads of the timed code
    modes: tuple[Literal["eager", "compile", "cudagraph"], ...]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        for name in ("batches", "prompts", "modes"):
            _distinct(f"bench.{name}", getattr(self, name))
        if self.new_tokens % self.block:
            raise ValueError(f"new_tokens ({self.new_tokens}) is not a multiple of block ({self.block})")
        return self


class Assumption(Strict):
    """A choice that the paper's text does not give."""

    setting: str | None  # dotted path into this config; null: fixed in the code
    assumed: Literal[True]
    reason: str


class Config(Strict):
    """One run of the whole pipeline."""

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # folder name under results/ and figures/
    caption: str  # printed under every table and figure of the run: what scale this is
    seeds: tuple[Annotated[int, Field(ge=0)], ...]
    data: DataConfig
    tokenizer: TokenizerConfig
    model: ModelConfig
    widths: tuple[WidthConfig, ...]
    train: TrainConfig
    taper: TaperConfig
    bench: BenchConfig
    hardware: HardwareConfig
    assumptions: tuple[Assumption, ...]

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        return _distinct("seeds", seeds)

    @field_validator("widths")
    @classmethod
    def _widths_differ(cls, widths: tuple[WidthConfig, ...]) -> tuple[WidthConfig, ...]:
        _distinct("widths' d_model", [w.d_model for w in widths])
        for width in widths:
            _distinct(f"variants at d_model {width.d_model}", width.variants)
        return widths

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        if (self.hardware.micro_batch or 0) > self.train.batch:
            raise ValueError(
                f"hardware.micro_batch ({self.hardware.micro_batch}) exceeds train.batch ({self.train.batch}): "
                "make it smaller, or null for the whole batch at once"
            )
        anchored = any(variant.endswith("_aux") for width in self.widths for variant in width.variants)
        if anchored and self.taper.anchor_weight == 0:
            raise ValueError("taper.anchor_weight is 0 and some variants are (+aux): leave those out, or give a weight")
        return self

    @model_validator(mode="after")
    def _every_job_is_possible(self) -> Self:
        for width in self.widths:
            for variant in width.variants:
                self.pretrain_job(variant, width.d_model, self.seeds[0])
        return self

    @model_validator(mode="after")
    def _assumptions_name_settings(self) -> Self:
        for assumption in self.assumptions:
            if assumption.setting is not None and not _has_setting(self, assumption.setting.split(".")):
                raise ValueError(f"assumptions: {assumption.setting!r} names no setting of this config")
        return self

    @property
    def widest(self) -> WidthConfig:
        return max(self.widths, key=lambda w: w.d_model)

    def width(self, d_model: int) -> WidthConfig:
        for width in self.widths:
            if width.d_model == d_model:
                return width
        raise UserError(f"no width {d_model} in this config; it has {[w.d_model for w in self.widths]}")

    def corpus_job(self) -> "CorpusJob":
        return CorpusJob(data=self.data)

    def tokenizer_job(self) -> "TokenizerJob":
        return TokenizerJob(tokenizer=self.tokenizer)

    def tokens_job(self) -> "TokensJob":
        return TokensJob(context=self.model.context)

    def report_job(self) -> "ReportJob":
        labels = {width.d_model: width.label for width in self.widths}
        return ReportJob(run=self.run, caption=self.caption, labels=labels)

    def bench_job(self) -> "BenchJob":
        return BenchJob(run=self.run, bench=self.bench)

    @property
    def benched(self) -> tuple[Variant, int, int] | None:
        """The (variant, width, seed) that the decoding benchmark takes: the widest Internal-Taper (+aux), if any."""
        widths = [w.d_model for w in self.widths if "internal_aux" in w.variants]
        return ("internal_aux", max(widths), self.seeds[0]) if widths else None

    def pretrain_job(self, variant: Variant, d_model: int, seed: int) -> "PretrainJob":
        """The job of one (variant, width, seed), holding only what that variant reads."""
        width = self.width(d_model)
        tapered = variant != "baseline"
        anchored = variant.endswith("_aux")
        return PretrainJob(
            variant=variant,
            seed=seed,
            steps=width.steps,
            model=DecoderConfig(
                d_model=width.d_model,
                d_ff=width.d_ff,
                vocab_size=self.tokenizer.vocab_size,
                **self.model.model_dump(),
            ),
            train=self.train,
            taper=self.taper.model_copy(update={} if anchored else {"anchor_weight": 0.0}) if tapered else None,
        )

    def pretrain_cells(self) -> list[tuple[Variant, int, int]]:
        """Every (variant, width, seed) of the run, widest first."""
        widths = sorted(self.widths, key=lambda w: -w.d_model)
        return [(v, w.d_model, s) for w in widths for v in w.variants for s in self.seeds]


class DecoderConfig(Strict):
    """Shape of one decoder; saved as config.json beside its weights."""

    vocab_size: PositiveInt
    d_model: PositiveInt
    n_layer: PositiveInt
    n_head: PositiveInt
    n_kv_head: PositiveInt
    d_ff: PositiveInt
    context: Annotated[int, Field(ge=2)]
    norm: Literal["rmsnorm", "layernorm"]
    norm_eps: Annotated[float, Field(gt=0)]
    rope_theta: Annotated[float, Field(gt=0)]
    tie_head: bool

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.d_model % self.n_head:
            raise ValueError(
                f"d_model {self.d_model} is not divisible by n_head {self.n_head}: "
                f"choose a multiple of {self.n_head}, or fewer heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head size {self.head_dim} (d_model {self.d_model} / n_head {self.n_head}) is odd, "
                "and rotary positions turn pairs of channels: choose an even head size"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not divisible by n_kv_head {self.n_kv_head}")
        return self

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_head


class CorpusJob(Strict):
    """What defines a corpus."""

    data: DataConfig


class TokenizerJob(Strict):
    """What defines a tokenizer, its corpus apart."""

    tokenizer: TokenizerConfig


class TokensJob(Strict):
    """What defines token streams, corpus and tokenizer apart: they must hold at least one window."""

    context: Annotated[int, Field(ge=2)]


class BenchJob(Strict):
    """What defines a decoding benchmark, its model apart."""

    run: str
    bench: BenchConfig


class ReportJob(Strict):
    """What a table or figure says about its run."""

    run: str
    caption: str
    labels: dict[int, str]  # d_model -> label of the size


class PretrainJob(Strict):
    """What defines the numbers of one training run, its token stream apart."""

    variant: Variant
    seed: Annotated[int, Field(ge=0)]
    steps: Annotated[int, Field(ge=2)]
    model: DecoderConfig
    train: TrainConfig
    taper: TaperConfig | None  # None for the Baseline, which must not depend on it

    @model_validator(mode="after")
    def _taper_fits(self) -> Self:
        if (self.taper is None) != (self.variant == "baseline"):
            raise ValueError(f"variant {self.variant!r} and taper={self.taper} do not go together")
        if self.taper is not None:
            from .schedule import GateSchedule

            GateSchedule.from_fractions(self.steps, self.taper.start_fraction, self.taper.end_fraction)
        return self


def _has_setting(node: Any, path: Sequence[str]) -> bool:
    """Whether the models below `node`, and every item of a list, have a field at `path`."""
    if isinstance(node, tuple):
        return all(_has_setting(item, path) for item in node)
    if not path:
        return True
    return (
        isinstance(node, BaseModel)
        and path[0] in type(node).model_fields
        and _has_setting(getattr(node, path[0]), path[1:])
    )


def _distinct(name: str, items: Items) -> Items:
    if not items:
        raise ValueError(f"{name}: at least one is needed")
    repeated = sorted({str(i) for i in items if items.count(i) > 1})
    if repeated:
        raise ValueError(f"{name}: {', '.join(repeated)} given twice; each may appear once")
    return items


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces. Equal values give equal text."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """First 16 hex digits of the sha256 of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def paper_d_ff(d_model: int) -> int:
    """SwiGLU width 8 round(d/3): a multiple of eight near 8d/3, deduced from the paper's size labels (section 8)."""
    return 8 * math.floor(d_model / 3 + 0.5)
