"""The sections of a config: strict, frozen models, with one line per setting that gives its unit and source."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from tapernorm.schedule import HORIZON

from .variants import PaperVariant

OWN_SPLIT = ("tinystories", "openwebtext")  # sources that come divided into training and validation text

_LARGEST = 2**31 - 1  # largest count, which every index and table can hold
Beta = Annotated[float, Field(ge=0, lt=1)]
PositiveInt = Annotated[int, Field(gt=0, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
AtLeastTwo = Annotated[int, Field(ge=2, le=_LARGEST)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]  # a generator's seed has 64 bits
Text = Annotated[str, Field(min_length=1)]  # a path, a hub name, a field
Label = Annotated[str, Field(pattern=r"^[^\r\n]*\S[^\r\n]*$", max_length=200)]  # a cell of a table: one line, not empty
NAME_LENGTH = 64  # most characters of a name that becomes a folder or file name
NAME = re.compile(r"\w[\w-]*")  # such a name, given as a command-line option
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # a run's folder under results/ and figures/
RunName = Annotated[str, Field(pattern=RUN_NAME, max_length=NAME_LENGTH)]
Rate = Annotated[float, Field(gt=0, le=1)]
Items = TypeVar("Items", bound=Sequence[Any])


class Strict(BaseModel):
    """Base of every model of a config: frozen, without unknown keys, and without conversion between kinds of values."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _is_not_converted(cls, given: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        value = validate(given)
        _require_one_kind(given, value)
        return value


def _require_one_kind(given: Any, value: Any) -> None:
    """Refuse a value that pydantic converted between boolean and number, or from text to boolean or integer.

    Text may become a float, because YAML 1.1 reads 1e-3 as text.

    Raises:
        ValueError: `value` is of another kind than `given`.
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
        raise ValueError(f"{given!r} is text, but an integer is needed: write its digits without quotes")


class DataConfig(Strict):
    """One text: its source, and its split into training and validation documents."""

    source: Literal["web", "tinystories", "openwebtext", "python_stdlib", "text"]
    # source text: paths or globs of .txt, .jsonl or .parquet files; source openwebtext: Parquet files that replace the
    # hub's; other sources: empty
    files: tuple[Text, ...]
    field: Text | None  # source text: key of a JSON line, or column of a Parquet file; other sources: null
    part: Literal["first", "second"] | None  # source python_stdlib: one half, by hash, or null for all; others: null
    valid_fraction: Annotated[float, Field(gt=0, le=1)] | None  # of documents, by hash; null: the source's own split
    max_train_documents: PositiveInt | None  # keep the first N documents of the training split; null: all

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        text, own_split = self.source == "text", self.source in OWN_SPLIT
        if text != (self.field is not None) or (text and not self.files):
            raise ValueError(
                f"data.source is {self.source!r}, data.files {list(self.files)} and data.field {self.field!r}: source "
                "'text' needs files and a field; for any other source set the field to null"
            )
        if self.files and self.source not in ("text", "openwebtext"):
            raise ValueError(f"data.source {self.source!r} reads no data.files: empty the list {list(self.files)}")
        if self.part is not None and self.source != "python_stdlib":
            raise ValueError(f"data.part is {self.part!r}: only source 'python_stdlib' has halves; set it to null")
        if own_split != (self.valid_fraction is None):
            raise ValueError(
                f"data.source is {self.source!r} and data.valid_fraction {self.valid_fraction}: set it to null for "
                f"{' and '.join(OWN_SPLIT)}, which have a split of their own, and to a fraction for other sources"
            )
        return self


class TokenizerConfig(Strict):
    """A SentencePiece tokenizer, lossless on any text."""

    vocab_size: Annotated[int, Field(ge=260, le=_LARGEST)]  # pieces, including the 256 bytes and 2 special ids
    model_type: Literal["bpe", "unigram"]
    max_documents: PositiveInt | None  # documents to train on, drawn by hash over the whole split; null: all
    literal_u2581: Literal["refuse", "as_space"]  # treatment of U+2581, SentencePiece's own mark for a space


class ModelConfig(Strict):
    """The decoder's settings that all widths share (method.md section 8)."""

    n_layer: PositiveInt
    n_head: PositiveInt
    n_kv_head: PositiveInt
    context: AtLeastTwo  # tokens
    norm: Literal["rmsnorm", "layernorm"]
    norm_eps: Annotated[float, Field(gt=0)]
    rope_theta: Annotated[float, Field(gt=0)]
    tie_head: bool


class WidthConfig(Strict):
    """One width of the run, with its own training length and variants."""

    d_model: PositiveInt
    d_ff: PositiveInt  # SwiGLU hidden width
    label: Label  # the paper's name of the size, or the width itself
    steps: AtLeastTwo  # optimizer steps
    variants: tuple[PaperVariant, ...]


class TrainConfig(Strict):
    """Optimisation (method.md section 9), logging and evaluation of a training run."""

    batch: PositiveInt  # windows of `context` tokens per optimizer step
    lr: Annotated[float, Field(gt=0)]  # peak
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)]  # of the steps; linear warm-up, then cosine to zero
    betas: tuple[Beta, Beta]
    adam_eps: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)]
    clip_norm: Annotated[float, Field(gt=0)]  # global gradient norm
    precision: Literal["float32", "bf16"]  # bf16: autocast, weights stay float32
    log_every: PositiveInt  # steps
    eval_every: Count  # steps; 0: at the end only


class TaperConfig(Strict):
    """Gate schedule, calibration and scale loss (method.md sections 3 to 5)."""

    start_fraction: Annotated[float, Field(gt=0, lt=1)]  # of the steps: where the gate starts to fall
    end_fraction: Annotated[float, Field(gt=0, le=1)]  # of the steps: where the gate reaches 0; the paper's is 1.0
    ema_rate: Rate | None  # m, the rate of the running means behind c and s_tgt; null: follows from ema_horizon
    ema_horizon: Rate = HORIZON  # 1/m as a fraction of the steps before the gate falls, at least 2 steps; see ema_rate
    anchor_weight: Annotated[float, Field(ge=0)]  # lambda of the scale loss, in the variants that have one

    @model_serializer(mode="wrap")
    def _in_force(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out a horizon that `ema_rate` replaces, so that it is no part of a job's identity."""
        content = dump(self)
        if self.ema_rate is not None:
            del content["ema_horizon"]
        return content

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.end_fraction <= self.start_fraction:
            raise ValueError(
                f"taper.end_fraction ({self.end_fraction}) must lie after taper.start_fraction ({self.start_fraction})"
            )
        return self


class HardwareConfig(Strict):
    """The hardware settings of a job. They are not part of a job's identity: a change reruns nothing."""

    device: Literal["auto", "cpu", "cuda"]
    threads: PositiveInt  # CPU threads of one training job
    linear: Literal["aten", "onednn", "auto"]  # kernel of float32 linear maps on a CPU; auto: by a probe, once per run
    compile: bool  # torch.compile of the training step; on a CPU without a C++ compiler it stays eager
    micro_batch: PositiveInt | None  # windows per forward pass; null: the whole batch at once
    checkpoint_every: PositiveInt  # steps
    tensorboard: bool  # event files beside the JSON lines
    activation_checkpointing: bool  # recompute activations inside blocks in the backward pass, instead of keeping them
    jobs_per_gpu: PositiveInt  # pre-training jobs that share one GPU; a fine-tune has a GPU to itself
    devices_per_job: PositiveInt  # processes of one pre-training, one GPU each; fine-tunes: see the GPT-2 size


class BenchConfig(Strict):
    """The decoding benchmark (method.md section 11), on the widest Internal-Taper (+aux) model."""

    dtype: Literal["float32", "bfloat16"]
    batches: tuple[PositiveInt, ...]  # sequences
    prompts: tuple[PositiveInt, ...]  # tokens
    new_tokens: PositiveInt  # tokens decoded after each prompt
    block: PositiveInt  # decode steps between two synchronisations, which give one sample
    rounds: PositiveInt  # samples of every arm
    warmup: PositiveInt  # untimed rounds
    threads: PositiveInt  # CPU threads of the timed code
    modes: tuple[Literal["eager", "compile", "cudagraph"], ...]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        for name in ("batches", "prompts", "modes"):
            distinct(f"bench.{name}", getattr(self, name))
        if self.new_tokens % self.block:
            raise ValueError(f"new_tokens ({self.new_tokens}) must be a multiple of block ({self.block})")
        return self


class Assumption(Strict):
    """A choice that the paper does not state."""

    setting: str | None  # dotted path of the setting in this config; null: fixed in the code
    assumed: Literal[True]
    reason: str


def distinct(name: str, items: Items) -> Items:
    """Return `items`, which the setting `name` holds.

    Raises:
        ValueError: `items` is empty, or an item occurs twice.
    """
    if not items:
        raise ValueError(f"{name}: at least one is needed")
    repeated = sorted({str(i) for i in items if items.count(i) > 1})
    if repeated:
        raise ValueError(f"{name}: {', '.join(repeated)} given twice; each may appear only once")
    return items


def paper_d_ff(d_model: int) -> int:
    """Return the SwiGLU width 8 round(d/3), as deduced from the paper's size labels (method.md section 8)."""
    return 8 * math.floor(d_model / 3 + 0.5)
