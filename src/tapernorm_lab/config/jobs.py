"""The job of each rule: exactly what defines its numbers, cut from a `Config`.

A change of a setting thus reruns what depends on it and nothing else. Hardware is not part of a job.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tapernorm.models.decoder_config import DecoderConfig
from tapernorm.util.errors import UserError

from .gpt2 import (
    TAPERED,
    FakeStages,
    FinetuneConfig,
    FreshBase,
    Gpt2Config,
    HubRows,
    Method,
    Name,
    TaperWindow,
)
from .sections import (
    Assumption,
    AtLeastTwo,
    BenchConfig,
    Count,
    DataConfig,
    ModelConfig,
    PositiveInt,
    Seed,
    Strict,
    TaperConfig,
    Text,
    TokenizerConfig,
    TrainConfig,
    WidthConfig,
)
from .variants import AnyVariant


class CorpusJob(Strict):
    """What defines a corpus: its texts, one after the other."""

    data: tuple[DataConfig, ...]


class TokenizerJob(Strict):
    """What defines a tokenizer, its corpus apart."""

    tokenizer: TokenizerConfig


class TokensJob(Strict):
    """What defines token streams, corpus and tokenizer apart: they must hold at least one window."""

    context: AtLeastTwo


class BenchJob(Strict):
    """What defines a decoding benchmark, its model apart."""

    run: str
    bench: BenchConfig


class ReportJob(Strict):
    """What a table or figure says about its run."""

    run: str
    caption: str
    labels: dict[int, str]  # d_model -> label of the size
    clip_norm: float | None = None  # largest global gradient norm of pre-training; null: figures draw no such line


class ClaimsJob(Strict):
    """What the table of claims must know of its run besides the numbers."""

    run: str
    caption: str
    text: str  # source of the pre-training text: the paper's claims are about one of them


class SettingsJob(Strict):
    """What Tables 4 and 5 are written from."""

    run: str
    caption: str
    seeds: tuple[Seed, ...]
    model: ModelConfig
    widths: tuple[WidthConfig, ...]
    train: TrainConfig
    taper: TaperConfig
    gpt2: Gpt2Config | None
    assumptions: tuple[Assumption, ...]


class PretrainJob(Strict):
    """What defines the numbers of one training run, its token stream apart."""

    variant: AnyVariant
    seed: Seed
    steps: AtLeastTwo
    model: DecoderConfig
    train: TrainConfig
    taper: TaperConfig | None  # None for the Baseline, which must not depend on it

    @model_validator(mode="after")
    def _taper_fits(self) -> Self:
        if (self.taper is None) != self.variant.plain:
            raise ValueError(f"variant {self.variant} and taper={self.taper} do not go together")
        if self.taper is not None:
            from tapernorm.schedule import GateSchedule

            GateSchedule.from_fractions(self.steps, self.taper.start_fraction, self.taper.end_fraction)
        return self


class BpeJob(Strict):
    """What defines a tokenizer that is taken as published."""

    source: Text  # hub name or folder


class BlocksJob(Strict):
    """What defines blocks of tokens, corpus and tokenizer apart."""

    context: AtLeastTwo  # tokens of a block
    block_documents: PositiveInt | None  # documents cut together, their rest dropped; null: the whole split
    max_rows: PositiveInt | None  # of the validation split; null: all


class HubRowsJob(Strict):
    """What defines rows that come tokenized from the hub."""

    rows: HubRows
    context: AtLeastTwo
    max_rows: PositiveInt | None


class FilterJob(Strict):
    """What defines a filtered corpus, the rows that it filters and the text that it compares with apart."""

    seen_rows: PositiveInt | None  # compare with so many rows drawn from that text; null: with all


class BaseJob(Strict):
    """What defines a GPT-2 to start from: a published one, or one trained here."""

    size: Name
    source: Text | None  # hub name or folder
    fresh: FreshBase | None
    context: AtLeastTwo
    seed: Seed

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.source is None) == (self.fresh is None):
            raise ValueError("a base model comes from `source` or is `fresh`: give one and null for the other")
        return self


class TuningJob(Strict):
    """What defines every training that starts from a model: its rows, its optimizer, and where a gate falls."""

    seed: Seed
    context: AtLeastTwo
    steps: AtLeastTwo
    lr: Annotated[float, Field(gt=0)]  # peak
    min_lr: Annotated[float, Field(ge=0)]
    warmup_steps: Count
    decay_steps: PositiveInt
    batch: PositiveInt  # blocks per optimizer step
    train: FinetuneConfig
    aux_weight: Annotated[float, Field(ge=0)]  # lambda of the loss beside the cross-entropy; 0 without one
    taper: TaperWindow | None
    micro_batch: PositiveInt | None  # blocks per forward pass where it defines the numbers: FakeLN, levels


class FinetuneJob(TuningJob):
    """What defines the numbers of one fine-tune of a GPT-2, base model and blocks apart."""

    method: Method
    size: Name
    fakeln: FakeStages | None

    @model_validator(mode="after")
    def _method_fits(self) -> Self:
        fake, tapered = self.method == "fakeln", self.method in TAPERED
        for name, expected in {"fakeln": fake, "taper": tapered, "micro_batch": fake}.items():
            if (getattr(self, name) is not None) != expected:
                raise ValueError(f"method {self.method!r} and {name}={getattr(self, name)} do not go together")
        return self

    def require_whole_micro_batches(self, devices: int) -> None:
        """Raise UserError where `devices`, which define no number, would cut micro-batches, which define FakeLN's."""
        if self.micro_batch is not None and self.batch % (self.micro_batch * devices):
            raise UserError(
                f"FakeLN's micro-batches of {self.micro_batch} blocks do not fit into {devices} equal shares of "
                f"{self.batch}: its auxiliary loss is each micro-batch's own; take fewer (devices_per_job of the size)"
            )


class ModelUnderTest(Strict):
    """Which model an evaluation scores."""

    kind: Literal["original", "finetuned", "published"]
    size: Name
    method: str
    seed: Seed | None  # of the fine-tune; null for a model as published
    base: str  # what it started from: a hub name or folder, or that it was pre-trained here


class EvaluateJob(Strict):
    """What defines an evaluation, model and blocks apart."""

    model: ModelUnderTest
    labels: dict[str, str]  # corpus -> label
    columns: dict[str, str]  # corpus -> published column it stands beside
