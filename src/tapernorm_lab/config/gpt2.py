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
MADE_HERE = "pre-trained here"  # a base model of our own
METHOD_LABELS: dict[str, str] = {
    ORIGINAL: "Original",
    "vanilla": "Vanilla",
    "fakeln": "FakeLN",
    "internal_aux": "Internal-TaperLN (+aux)",
    "all_aux": "All-TaperLN (+aux)",
    "published_vanilla": "Vanilla, published weights",
    "published_fakeln": "FakeLN, published weights",
}
TEXTS = ("base", "train")  # what base models and tokenizer, and what fine-tunes, are trained on
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=NAME_LENGTH)]


class Gpt2Shape(Strict):
    """A GPT-2 of a size of one's own; its vocabulary is the tokenizer's."""

    d_model: PositiveInt
    n_layer: PositiveInt
    n_head: PositiveInt
    dropout: Annotated[float, Field(ge=0, lt=1)]  # of residual stream, embeddings and attention
    norm_eps: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.d_model % self.n_head:
            raise ValueError(f"d_model {self.d_model} is not divisible by n_head {self.n_head}")
        return self


class FreshBase(Strict):
    """A base model of our own making."""

    shape: Gpt2Shape
    steps: AtLeastTwo  # optimizer steps
    train: TrainConfig


class FakeStages(FakeSchedule):
    """FakeLN's removals, in optimizer steps, and the mean that they freeze."""

    ema_rate: Rate  # of sigma; 1: the last optimizer step's mean alone


class TaperWindow(Strict):
    """Where the gate falls, in optimizer steps."""

    start: PositiveInt
    end: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"taper.end ({self.end}) must lie after taper.start ({self.start})")
        return self


class PublishedModel(Strict):
    """A checkpoint that others published, evaluated beside ours."""

    method: Literal["vanilla", "fakeln"]
    source: Text  # hub name, or folder


class Gpt2Size(Strict):
    """One size: its base model and the hyper-parameters of its fine-tunes."""

    name: Name
    source: Text | None  # hub name or folder of the base model; null: made here, as `fresh` says
    fresh: FreshBase | None
    steps: AtLeastTwo  # optimizer steps
    lr: Annotated[float, Field(gt=0)]  # peak
    min_lr: Annotated[float, Field(ge=0)]
    warmup_steps: Count
    decay_steps: PositiveInt  # where the cosine reaches min_lr; may lie after the last step
    batch: PositiveInt  # blocks per optimizer step
    micro_batch: PositiveInt  # blocks per forward pass; part of FakeLN's auxiliary loss, else only of dropout's draw
    devices_per_job: PositiveInt  # processes of one fine-tune, a GPU each; hardware: only dropout's draw depends on it
    activation_checkpointing: bool  # as in the hardware section, for the fine-tunes of this size
    checkpoint_every: PositiveInt  # optimizer steps; likewise
    fakeln_weight: Annotated[float, Field(ge=0)]  # lambda of FakeLN's auxiliary loss
    anchor_weight: Annotated[float, Field(gt=0)]  # lambda of the fixed-target scale loss
    taper: TaperWindow
    fakeln: FakeStages
    published: tuple[PublishedModel, ...]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if (self.source is None) == (self.fresh is None):
            raise ValueError("a size starts from `source` or from `fresh`: give one and null for the other")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) exceeds lr ({self.lr})")
        if self.batch % self.micro_batch:
            raise ValueError(f"batch ({self.batch}) is not a multiple of micro_batch ({self.micro_batch})")
        if self.warmup_steps >= self.decay_steps or self.decay_steps < self.steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) must lie below decay_steps ({self.decay_steps}), and those must "
                f"reach steps ({self.steps})"
            )
        if self.taper.end > self.steps:
            raise ValueError(f"taper.end ({self.taper.end}) lies after the last step ({self.steps})")
        if self.fakeln.final > self.steps:
            raise ValueError(f"fakeln.final ({self.fakeln.final}) lies after the last step ({self.steps})")
        if self.fresh:
            removal_steps(self.fakeln, self.fresh.shape.n_layer)  # a depth of elsewhere is not known yet
        if self.published:
            distinct("published methods", [p.method for p in self.published])
        return self


class FinetuneConfig(Strict):
    """Optimisation that all sizes share."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]
    adam_eps: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)]  # of matrices only
    clip_norm: Annotated[float, Field(gt=0)]  # global gradient norm
    precision: Literal["float32", "bf16"]  # bf16: autocast, weights stay float32
    ema_rate: Rate  # m of calibration and scale target
    log_every: PositiveInt  # steps
    eval_every: Count  # steps; 0: at the end only


class HubRows(Strict):
    """Tokenized rows on the hub, as long as a block."""

    name: Text  # of a data set, or a folder of Parquet files, all of which are read
    revision: Text | None  # null: the newest; of a folder: null
    split: Text  # of a data set
    field: Text  # column that holds the token ids


# Kind of an evaluation corpus -> the fields that it needs, and those that it may have.
_READS: dict[str, tuple[set[str], set[str]]] = {
    "held_out": (set(), {"max_rows"}),
    "text": ({"text"}, {"max_rows"}),
    "rows": ({"rows"}, {"max_rows"}),
    "filtered": ({"of", "seen"}, {"seen_rows"}),  # it keeps what it keeps
}


class EvalCorpus(Strict):
    """A column of Table 3."""

    name: Name
    label: Label
    kind: Literal["held_out", "text", "rows", "filtered"]
    text: tuple[DataConfig, ...]  # text: what is scored; valid_fraction 1
    rows: HubRows | None  # rows
    of: Name | None  # filtered: rows of this corpus whose every token ...
    seen: Literal["base", "train"] | None  # ... this text's training split holds somewhere
    seen_rows: PositiveInt | None  # filtered: compare with so many rows drawn from that split; null: with all of it
    max_rows: PositiveInt | None  # score so many rows: a draw of all, or of `rows` the first; null: all
    column: Literal["owt", "pile", "pile_filtered"]  # which published column it stands beside

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        needed, optional = _READS[self.kind]
        all_fields = {field for fields in _READS.values() for part in fields for field in part}
        given = {field for field in all_fields if getattr(self, field) not in (None, ())}
        if missing := needed - given:
            raise ValueError(f"{self.name}: kind {self.kind!r} needs {', '.join(sorted(missing))}")
        if unread := given - needed - optional:
            raise ValueError(f"{self.name}: kind {self.kind!r} reads no {', '.join(sorted(unread))}: leave it out")
        if self.name in TEXTS:
            raise ValueError(f"{self.name}: {' and '.join(TEXTS)} are the names of the training texts; take another")
        for text in self.text:
            if text.valid_fraction != 1:
                raise ValueError(f"{self.name}: all of its text is scored, so its valid_fraction must be 1")
        return self


class Gpt2Config(Strict):
    """The GPT-2 track: Table 3."""

    seeds: tuple[Seed, ...]
    methods: tuple[Method, ...]
    context: AtLeastTwo  # tokens of a block
    block_documents: PositiveInt | None  # documents that are cut into blocks together, their rest dropped; null: all
    tokenizer: TokenizerConfig | None  # trained on the base text; null: GPT-2's own
    bpe: Text | None  # hub name or folder of GPT-2's own tokenizer; null: one is trained
    base_text: tuple[DataConfig, ...]  # what base models and tokenizer are trained on; empty: they come from elsewhere
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
            raise ValueError(f"gpt2.corpora: {', '.join(held_out)} are the same held-out rows; leave one")
        if (self.tokenizer is None) == (self.bpe is None):
            raise ValueError("gpt2.tokenizer or gpt2.bpe: give one and null for the other")
        made_here = self.tokenizer is not None or any(size.fresh for size in self.sizes)
        made_here |= any(corpus.seen == "base" for corpus in self.corpora)
        if made_here != bool(self.base_text):
            raise ValueError(
                "gpt2.base_text is what `tokenizer`, a `fresh` size or a filter with seen: base read: give it with one "
                "of them, leave it empty without"
            )
        for position, corpus in enumerate(self.corpora):
            if corpus.of is not None and corpus.of not in names[:position]:
                raise ValueError(f"gpt2.corpora: {corpus.name} filters {corpus.of!r}, which does not stand before it")
        return self

    def corpus(self, name: str) -> EvalCorpus:
        """The evaluation corpus of this name; KeyError without one."""
        return {corpus.name: corpus for corpus in self.corpora}[name]
