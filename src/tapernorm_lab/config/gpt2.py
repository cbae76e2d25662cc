"""The GPT-2 sections of a config: base models, fine-tunes by four methods, evaluation (method.md sections 10, 11)."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .fakeln_schedule import FakeSchedule, removal_steps
from .sections import (
    NAME_LENGTH,
    AtLeastTwo,
    Count,
    DataConfig,
    Label,
    PositiveInt,
    Rate,
    Seed,
    Strict,
    Text,
    TokenizerConfig,
    TrainConfig,
    distinct,
)
from .variants import Variant

Method = Literal["vanilla", "fakeln", "internal_aux", "all_aux"]
METHODS: tuple[Method, ...] = ("vanilla", "fakeln", "internal_aux", "all_aux")
TAPERED = {name: Variant.named(name) for name in ("internal_aux", "all_aux")}  # methods that are variants
ORIGINAL = "original"  # the base model before any fine-tuning
MADE_HERE = "pre-trained here"  # a base model that this project trains from scratch
METHOD_LABELS: dict[str, str] = {
    ORIGINAL: "Original",
    "vanilla": "Vanilla",
    "fakeln": "FakeLN",
    "internal_aux": "Internal-TaperLN (+aux)",
    "all_aux": "All-TaperLN (+aux)",
    "published_vanilla": "Vanilla, published weights",
    "published_fakeln": "FakeLN, published weights",
}
TEXTS = ("base", "train")  # base: trains base models and the tokenizer; train: trains the fine-tunes
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=NAME_LENGTH)]


class Gpt2Shape(Strict):
    """The shape of a GPT-2 that is trained from scratch; its vocabulary is the tokenizer's."""

    d_model: PositiveInt
    n_layer: PositiveInt
    n_head: PositiveInt
    dropout: Annotated[float, Field(ge=0, lt=1)]  # probability, for residual stream, embeddings and attention
    norm_eps: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.d_model % self.n_head:
            raise ValueError(f"d_model {self.d_model} is not divisible by n_head {self.n_head}")
        return self


class FreshBase(Strict):
    """A base model that is trained from scratch."""

    shape: Gpt2Shape
    steps: AtLeastTwo  # optimizer steps
    train: TrainConfig


class FakeStages(FakeSchedule):
    """FakeLN's removal steps, in optimizer steps, and the rate of the average that a removal freezes."""

    ema_rate: Rate  # rate of the moving average of sigma; 1: the mean of the last optimizer step alone


class TaperWindow(Strict):
    """The steps at which the gate starts and stops falling, in optimizer steps."""

    start: PositiveInt
    end: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"taper.end ({self.end}) must lie after taper.start ({self.start})")
        return self


class PublishedModel(Strict):
    """A checkpoint published by others, which is evaluated beside ours."""

    method: Literal["vanilla", "fakeln"]
    source: Text  # hub name, or folder


class Gpt2Size(Strict):
    """One GPT-2 size: its base model and the hyper-parameters of its fine-tunes."""

    name: Name
    source: Text | None  # hub name or folder of the base model; null: trained from scratch, see `fresh`
    fresh: FreshBase | None
    steps: AtLeastTwo  # optimizer steps
    lr: Annotated[float, Field(gt=0)]  # peak
    min_lr: Annotated[float, Field(ge=0)]
    warmup_steps: Count
    decay_steps: PositiveInt  # step at which the cosine reaches min_lr; at least `steps`
    batch: PositiveInt  # blocks per optimizer step
    micro_batch: PositiveInt  # blocks per forward pass; enters FakeLN's auxiliary loss, otherwise only dropout's draw
    devices_per_job: PositiveInt  # processes of one fine-tune, one GPU each; changes nothing but dropout's draw
    activation_checkpointing: bool  # replaces the setting of `hardware` for the fine-tunes of this size
    checkpoint_every: PositiveInt  # optimizer steps; replaces the setting of `hardware` in the same way
    fakeln_weight: Annotated[float, Field(ge=0)]  # lambda of FakeLN's auxiliary loss
    anchor_weight: Annotated[float, Field(gt=0)]  # lambda of the fixed-target scale loss
    taper: TaperWindow
    fakeln: FakeStages
    published: tuple[PublishedModel, ...]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if (self.source is None) == (self.fresh is None):
            raise ValueError("a size needs either `source` or `fresh`: give one, and set the other to null")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) exceeds lr ({self.lr})")
        if self.batch % self.micro_batch:
            raise ValueError(f"batch ({self.batch}) is not a multiple of micro_batch ({self.micro_batch})")
        if self.warmup_steps >= self.decay_steps or self.decay_steps < self.steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) must lie below decay_steps ({self.decay_steps}), and decay_steps "
                f"must be at least steps ({self.steps})"
            )
        if self.taper.end > self.steps:
            raise ValueError(f"taper.end ({self.taper.end}) lies after the last step ({self.steps})")
        if self.fakeln.final > self.steps:
            raise ValueError(f"fakeln.final ({self.fakeln.final}) lies after the last step ({self.steps})")
        if self.fresh:
            removal_steps(self.fakeln, self.fresh.shape.n_layer)  # the depth of a downloaded base is not known yet
        if self.published:
            distinct("published methods", [p.method for p in self.published])
        return self


class FinetuneConfig(Strict):
    """Optimisation settings that all sizes share."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]
    adam_eps: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)]  # applied to matrices only
    clip_norm: Annotated[float, Field(gt=0)]  # global gradient norm
    precision: Literal["float32", "bf16"]  # bf16: autocast, weights stay float32
    ema_rate: Rate  # m, the EMA rate of the calibration constant and of the scale target
    log_every: PositiveInt  # steps
    eval_every: Count  # steps; 0: at the end only


class HubRows(Strict):
    """Rows that are already tokenized, each as long as a block; from the hub or from a folder."""

    name: Text  # hub name of a data set, or a folder whose Parquet files are all read
    revision: Text | None  # revision of the data set; null: the newest; must be null for a folder
    split: Text  # split of the data set
    field: Text  # column that holds the token ids


# Kind of an evaluation corpus -> the fields that it needs, and the fields that it may have.
_READS: dict[str, tuple[set[str], set[str]]] = {
    "held_out": (set(), {"max_rows"}),
    "text": ({"text"}, {"max_rows"}),
    "rows": ({"rows"}, {"max_rows"}),
    "filtered": ({"of", "seen"}, {"seen_rows"}),  # no max_rows: the filter decides how many rows are left
}


class EvalCorpus(Strict):
    """An evaluation corpus: one column of Table 3."""

    name: Name
    label: Label
    kind: Literal["held_out", "text", "rows", "filtered"]
    text: tuple[DataConfig, ...]  # kind text: the texts that are scored, with valid_fraction 1
    rows: HubRows | None  # kind rows: the tokenized rows that are scored
    of: Name | None  # kind filtered: the corpus whose rows are filtered
    seen: Literal["base", "train"] | None  # kind filtered: keep rows whose tokens all occur in this training split
    seen_rows: PositiveInt | None  # kind filtered: rows drawn from that split for the comparison; null: all of it
    max_rows: PositiveInt | None  # rows to score: drawn at random, or the first ones for kind rows; null: all
    column: Literal["owt", "pile", "pile_filtered"]  # the published column that Table 3 prints beside it

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        needed, optional = _READS[self.kind]
        all_fields = {field for fields in _READS.values() for part in fields for field in part}
        given = {field for field in all_fields if getattr(self, field) not in (None, ())}
        if missing := needed - given:
            raise ValueError(f"{self.name}: kind {self.kind!r} needs {', '.join(sorted(missing))}")
        if unread := given - needed - optional:
            raise ValueError(f"{self.name}: kind {self.kind!r} reads no {', '.join(sorted(unread))}: set it to null")
        if self.name in TEXTS:
            raise ValueError(
                f"{self.name}: {' and '.join(TEXTS)} are reserved for the training texts; rename the corpus"
            )
        for text in self.text:
            if text.valid_fraction != 1:
                raise ValueError(f"{self.name}: valid_fraction must be 1, because the whole text is scored")
        return self


class Gpt2Config(Strict):
    """The GPT-2 track, which makes Table 3."""

    seeds: tuple[Seed, ...]
    methods: tuple[Method, ...]
    context: AtLeastTwo  # tokens of a block
    block_documents: PositiveInt | None  # documents joined before cutting into blocks, remainder dropped; null: all
    tokenizer: TokenizerConfig | None  # tokenizer to train on `base_text`; null: the published one, see `bpe`
    bpe: Text | None  # hub name or folder of GPT-2's published tokenizer; null: one is trained, see `tokenizer`
    base_text: tuple[DataConfig, ...]  # training text of base models and tokenizer; empty if neither is trained here
    text: tuple[DataConfig, ...]  # fine-tuning text
    train: FinetuneConfig
    sizes: tuple[Gpt2Size, ...]
    corpora: tuple[EvalCorpus, ...]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        distinct("gpt2.seeds", self.seeds)
        distinct("gpt2.methods", self.methods)
        distinct("gpt2.text", self.text)
        distinct("gpt2 sizes' names", [size.name for size in self.sizes])
        names = distinct("gpt2 corpora's names", [corpus.name for corpus in self.corpora])
        held_out = [corpus.name for corpus in self.corpora if corpus.kind == "held_out"]
        if len(held_out) > 1:
            raise ValueError(f"gpt2.corpora: {', '.join(held_out)} are the same held-out rows; keep one of them")
        if (self.tokenizer is None) == (self.bpe is None):
            raise ValueError("gpt2.tokenizer and gpt2.bpe: give one, and set the other to null")
        made_here = self.tokenizer is not None or any(size.fresh for size in self.sizes)
        made_here |= any(corpus.seen == "base" for corpus in self.corpora)
        if made_here != bool(self.base_text):
            raise ValueError(
                "gpt2.base_text must be given if `tokenizer`, a `fresh` size or a filter with seen: base reads it. "
                "Otherwise leave it empty"
            )
        for position, corpus in enumerate(self.corpora):
            if corpus.of is not None and corpus.of not in names[:position]:
                raise ValueError(f"gpt2.corpora: {corpus.name} filters {corpus.of!r}: list that corpus before it")
        return self

    def corpus(self, name: str) -> EvalCorpus:
        """Return the evaluation corpus of this name.

        Raises:
            KeyError: there is no such corpus.
        """
        return {corpus.name: corpus for corpus in self.corpora}[name]
