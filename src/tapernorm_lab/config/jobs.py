"""The job of each rule: the settings that define its numbers, taken from a `Config`.

A changed setting therefore reruns the jobs that hold it, and no other. Hardware settings are not part of a job.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tapernorm.models.decoder_config import DecoderConfig
from tapernorm.schedule import GateSchedule, ema_rate_over
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

_LONGEST_HORIZON = 0.1  # of the steps before the gate falls; longer running means are warned of


class CorpusJob(Strict):
    """The settings that define a corpus: its texts, which are concatenated in this order."""

    data: tuple[DataConfig, ...]


class TokenizerJob(Strict):
    """The settings that define a tokenizer, besides its corpus."""

    tokenizer: TokenizerConfig


class TokensJob(Strict):
    """The settings that define token streams, besides corpus and tokenizer. A stream holds at least one window."""

    context: AtLeastTwo


class BenchJob(Strict):
    """The settings that define a decoding benchmark, besides its model."""

    run: str
    bench: BenchConfig


class ReportJob(Strict):
    """The facts that a table or figure states about its run."""

    run: str
    caption: str
    labels: dict[int, str]  # d_model -> label of the size
    clip_norm: float | None = None  # clipping threshold of the global gradient norm; null: figures draw no such line


class ClaimsJob(Strict):
    """The facts that the table of claims needs about its run, besides the numbers."""

    run: str
    caption: str
    text: str  # `data.source` of the pre-training text; the paper's claims hold for one source only


class SettingsJob(Strict):
    """The settings that Tables 4 and 5 list."""

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
    """The settings that define the numbers of one pre-training run, besides its token stream."""

    variant: AnyVariant
    seed: Seed
    steps: AtLeastTwo
    model: DecoderConfig
    train: TrainConfig
    taper: TaperConfig | None  # None for the Baseline, whose identity must not depend on it

    @model_validator(mode="after")
    def _taper_fits(self) -> Self:
        if (self.taper is None) != self.variant.plain:
            raise ValueError(
                f"variant {self.variant} and taper={self.taper} do not go together: the Baseline has no taper section, "
                "and every other variant has one"
            )
        if self.taper is not None:
            self.schedule_of(self.taper)
        return self

    def schedule_of(self, taper: TaperConfig) -> GateSchedule:
        """Return the schedule of the gate, in optimizer steps of this job.

        Raises:
            ValueError: as `GateSchedule.from_fractions`.
        """
        return GateSchedule.from_fractions(self.steps, taper.start_fraction, taper.end_fraction)

    def ema_rate_of(self, taper: TaperConfig) -> float:
        """Return m of the running means: the setting `ema_rate`, or what follows from `ema_horizon`."""
        if taper.ema_rate is not None:
            return taper.ema_rate
        return ema_rate_over(self.schedule_of(taper).start, taper.ema_horizon)


def horizon_warning(jobs: Iterable[PretrainJob]) -> str | None:
    """Return a sentence on those of `jobs` whose horizon 1/m exceeds a tenth of k_start; None if none does.

    The pre-logit scale climbs while a model is trained from scratch. A mean over most of that climb lies far below the
    scale at k_start, and so does the target that it gives the scale loss.
    """
    found = [(1 / job.ema_rate_of(taper), job.schedule_of(taper).start) for job in jobs if (taper := job.taper)]
    if not (long := [(horizon, start) for horizon, start in found if horizon > _LONGEST_HORIZON * start]):
        return None
    horizon, start = (_range(values) for values in zip(*long, strict=True))
    some = f" in {len(long)} of {len(found)} trainings" if len(found) > 1 else ""
    return (
        f"warning: the running means behind c and s_tgt reach back over 1/m = {horizon} steps{some}, more than a tenth "
        f"of the {start} steps before the gate falls. Set taper.ema_rate to null, or train for more steps"
    )


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.4g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


class BpeJob(Strict):
    """The setting that defines a published tokenizer."""

    source: Text  # hub name or folder


class BlocksJob(Strict):
    """The settings that define blocks of tokens, besides corpus and tokenizer."""

    context: AtLeastTwo  # tokens of a block
    block_documents: PositiveInt | None  # documents joined before cutting, remainder dropped; null: the whole split
    max_rows: PositiveInt | None  # rows of the validation split; null: all


class HubRowsJob(Strict):
    """The settings that define rows that are downloaded already tokenized."""

    rows: HubRows
    context: AtLeastTwo
    max_rows: PositiveInt | None


class FilterJob(Strict):
    """The setting that defines a filtered corpus, besides its rows and the text that they are compared with."""

    seen_rows: PositiveInt | None  # rows drawn from that text for the comparison; null: all


class BaseJob(Strict):
    """The settings that define a GPT-2 base model, which is either published or trained from scratch."""

    size: Name
    source: Text | None  # hub name or folder
    fresh: FreshBase | None
    context: AtLeastTwo
    seed: Seed

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.source is None) == (self.fresh is None):
            raise ValueError("a base model needs either `source` or `fresh`: give one, and set the other to null")
        return self


class TuningJob(Strict):
    """The settings that define any training that starts from a model: its rows, optimizer and gate schedule."""

    seed: Seed
    context: AtLeastTwo
    steps: AtLeastTwo
    lr: Annotated[float, Field(gt=0)]  # peak
    min_lr: Annotated[float, Field(ge=0)]
    warmup_steps: Count
    decay_steps: PositiveInt
    batch: PositiveInt  # blocks per optimizer step
    train: FinetuneConfig
    aux_weight: Annotated[float, Field(ge=0)]  # lambda of the auxiliary loss; 0 without one
    taper: TaperWindow | None  # null: no norm is tapered
    micro_batch: PositiveInt | None  # blocks per forward pass, where it affects the numbers (FakeLN, levelling)


class FinetuneJob(TuningJob):
    """The settings that define the numbers of one GPT-2 fine-tune, besides base model and blocks."""

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
        """Check that `devices` processes can share the batch of a FakeLN job in whole micro-batches.

        FakeLN's auxiliary loss depends on the micro-batches, and the number of devices must not change it.

        Raises:
            UserError: the batch is not a multiple of `micro_batch` times `devices`.
        """
        if self.micro_batch is not None and self.batch % (self.micro_batch * devices):
            raise UserError(
                f"size {self.size}: {devices} devices cannot share a batch of {self.batch} blocks in whole "
                f"micro-batches of {self.micro_batch}, as FakeLN's loss requires. Lower the size's devices_per_job"
            )


class ModelUnderTest(Strict):
    """The model that an evaluation scores."""

    kind: Literal["original", "finetuned", "published"]
    size: Name
    method: str
    seed: Seed | None  # seed of the fine-tune; null for a published model
    base: str  # hub name or folder of its base model, or `MADE_HERE`


class EvaluateJob(Strict):
    """The settings that define an evaluation, besides model and blocks."""

    model: ModelUnderTest
    labels: dict[str, str]  # corpus -> label
    columns: dict[str, str]  # corpus -> published column that is printed beside it
