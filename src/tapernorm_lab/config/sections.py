"""The sections of a config: strict, frozen models, a line per setting with its unit and source."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, field_validator, model_validator

from .variants import PaperVariant

OWN_SPLIT = ("tinystories", "openwebtext")  # sources that come divided into training and validation text

_LARGEST = 2**31 - 1  # of a count: what any index and any table holds
Beta = Annotated[float, Field(ge=0, lt=1)]
PositiveInt = Annotated[int, Field(gt=0, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
AtLeastTwo = Annotated[int, Field(ge=2, le=_LARGEST)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]  # a generator's seed has 64 bits
Text = Annotated[str, Field(min_length=1)]  # a path, a hub name, a field
Label = Annotated[str, Field(pattern=r"^[^\r\n]*\S[^\r\n]*$", max_length=200)]  # a cell of a table: one line, not empty
NAME_LENGTH = 64  # characters of a name that names folders and files
NAME = re.compile(r"\w[\w-]*")  # of such a name that is an option of the command line
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # of a folder under results/ and figures/
RunName = Annotated[str, Field(pattern=RUN_NAME, max_length=NAME_LENGTH)]
Rate = Annotated[float, Field(gt=0, le=1)]
Items = TypeVar("Items", bound=Sequence[Any])


class Strict(BaseModel):
    """Base of every model here: frozen; an unknown key is an error, and so is a truth value in place of a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _is_not_converted(cls, given: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        value = validate(given)
        _require_one_kind(given, value)
        return value


def _require_one_kind(given: Any, value: Any) -> None:
    """Raise ValueError where a truth value became a number, or a number or text a truth value, or text an integer.

    Text may stand for a number that is no integer: YAML 1.1 reads 1e-3 as text.
    """
    if isinstance(given, list | tuple):
        for one, made in zip(given, value, strict=False):
            _require_one_kind(one, made)
    elif isinstance(given, dict) and isinstance(value, dict):
        for one, made in zip(given.values(), value.values(), strict=False):
            _require_one_kind(one, made)
    elif isinstance(given, bool) != isinstance(value, bool):
        wanted = "true or false" if isinstance(value, bool) else "a number"
        raise ValueError(f"{given!r} is not {wanted}")
    elif isinstance(given, str) and isinstance(value, int):
        raise ValueError(f"{given!r} is text, and an integer is needed: write its digits without quotes")


class DataConfig(Strict):
    """One text: where it is read from, and how it is split."""

    source: Literal["web", "tinystories", "openwebtext", "python_stdlib", "text"]
    files: tuple[Text, ...]  # text: paths or globs of .txt, .jsonl or .parquet files; openwebtext: Parquet files in
    # place of the hub's; empty for other sources
    field: Text | None  # text: the key of a JSON line, the column of a Parquet file; null for other sources
    part: Literal["first", "second"] | None  # python_stdlib: this half, by hash; null: all, or other source
    valid_fraction: Annotated[float, Field(gt=0, le=1)] | None  # of documents, by hash; null: the source's own split
    max_train_documents: PositiveInt | None  # keep the first so many of the training split; null: all

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        text, own_split = self.source == "text", self.source in OWN_SPLIT
        if text != (self.field is not None) or (text and not self.files):
            raise ValueError(
                f"data.source is {self.source!r}, data.files {list(self.files)} and data.field {self.field!r}: source "
                "'text' needs both, any other source null for the field"
            )
        if self.files and self.source not in ("text", "openwebtext"):
            raise ValueError(f"data.source {self.source!r} reads no data.files, and {list(self.files)} are given")
        if self.part is not None and self.source != "python_stdlib":
            raise ValueError(f"data.part is {self.part!r}: only source 'python_stdlib' comes in halves, leave it null")
        if own_split != (self.valid_fraction is None):
            raise ValueError(
                f"data.source is {self.source!r} and data.valid_fraction {self.valid_fraction}: it is null for "
                f"{' and '.join(OWN_SPLIT)}, which keep their own split, and a fraction for any other source"
            )
        return self


class TokenizerConfig(Strict):
    """SentencePiece, lossless on any text."""

    vocab_size: Annotated[int, Field(ge=260, le=_LARGEST)]  # pieces, the 256 bytes and 2 special ids included
    model_type: Literal["bpe", "unigram"]
    max_documents: PositiveInt | None  # train on this many, drawn by hash over the whole split; null: on all
    literal_u2581: Literal["refuse", "as_space"]  # U+2581 is SentencePiece's own space mark and decodes to a space


class ModelConfig(Strict):
    """The decoder of every width (method.md section 8)."""

    n_layer: PositiveInt
    n_head: PositiveInt
    n_kv_head: PositiveInt
    context: AtLeastTwo  # tokens
    norm: Literal["rmsnorm", "layernorm"]
    norm_eps: Annotated[float, Field(gt=0)]
    rope_theta: Annotated[float, Field(gt=0)]
    tie_head: bool


class WidthConfig(Strict):
    """One width of the study, with its own training length and variants."""

    d_model: PositiveInt
    d_ff: PositiveInt  # SwiGLU hidden width
    label: Label  # how the paper names the size, or the width itself
    steps: AtLeastTwo  # optimizer steps
    variants: tuple[PaperVariant, ...]


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
    eval_every: Count  # steps; 0: at the end only


class TaperConfig(Strict):
    """Gate, calibration and scale loss (sections 3-5)."""

    start_fraction: Annotated[float, Field(gt=0, lt=1)]  # of the steps
    end_fraction: Annotated[float, Field(gt=0, le=1)]  # of the steps; 1.0 is the paper
    ema_rate: Annotated[float, Field(gt=0, le=1)]  # m
    anchor_weight: Annotated[float, Field(ge=0)]  # lambda of the variants with a scale loss

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
    linear: Literal["aten", "onednn", "auto"]  # kernel of float32 linear maps on a CPU; auto: by a probe, once per run
    compile: bool  # torch.compile of the training step; on a CPU without a C++ compiler it stays eager
    micro_batch: PositiveInt | None  # windows per forward pass; null: the whole batch at once
    checkpoint_every: PositiveInt  # steps
    tensorboard: bool  # event files beside the JSON lines
    activation_checkpointing: bool  # keep no activations inside blocks, compute them again in the backward pass
    jobs_per_gpu: PositiveInt  # pre-trainings that share one GPU; a fine-tune has one to itself
    devices_per_job: PositiveInt  # processes of one pre-training, a GPU each; a GPT-2 size has its own for fine-tunes


class BenchConfig(Strict):
    """The decoding benchmark (section 11), on the widest Internal-Taper (+aux) model."""

    dtype: Literal["float32", "bfloat16"]
    batches: tuple[PositiveInt, ...]
    prompts: tuple[PositiveInt, ...]  # tokens
    new_tokens: PositiveInt  # decoded after each prompt
    block: PositiveInt  # decode steps between two synchronisations: one sample
    rounds: PositiveInt  # samples of every arm
    warmup: PositiveInt  # untimed rounds
    threads: PositiveInt  # CPU threads of the timed code
    modes: tuple[Literal["eager", "compile", "cudagraph"], ...]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        for name in ("batches", "prompts", "modes"):
            distinct(f"bench.{name}", getattr(self, name))
        if self.new_tokens % self.block:
            raise ValueError(f"new_tokens ({self.new_tokens}) is not a multiple of block ({self.block})")
        return self


class Assumption(Strict):
    """A choice that the paper's text does not give."""

    setting: str | None  # dotted path into this config; null: fixed in the code
    assumed: Literal[True]
    reason: str


def distinct(name: str, items: Items) -> Items:
    if not items:
        raise ValueError(f"{name}: at least one is needed")
    repeated = sorted({str(i) for i in items if items.count(i) > 1})
    if repeated:
        raise ValueError(f"{name}: {', '.join(repeated)} given twice; each may appear once")
    return items


def paper_d_ff(d_model: int) -> int:
    """SwiGLU width 8 round(d/3): a multiple of eight near 8d/3, deduced from the paper's size labels (section 8)."""
    return 8 * math.floor(d_model / 3 + 0.5)
