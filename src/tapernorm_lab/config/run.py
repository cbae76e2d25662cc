"""The model of a whole config, which config/*.yaml and the JSON schema follow."""

from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, field_validator, model_validator

from tapernorm.models.decoder_config import DecoderConfig
from tapernorm.util.errors import UserError

from .gpt2 import Gpt2Config
from .gpt2_jobs import Gpt2Jobs
from .jobs import (
    BenchJob,
    ClaimsJob,
    CorpusJob,
    PretrainJob,
    ReportJob,
    SettingsJob,
    TokenizerJob,
    TokensJob,
)
from .odd_inputs import (
    BASELINE,
    OddInputsReportJob,
    Robustness,
    RobustnessJob,
)
from .sections import (
    Assumption,
    BenchConfig,
    DataConfig,
    HardwareConfig,
    ModelConfig,
    RunName,
    Seed,
    Strict,
    TaperConfig,
    TokenizerConfig,
    TrainConfig,
    WidthConfig,
    distinct,
)
from .study import Arm, ArmJob, Stage
from .variants import VARIANT_LABELS, Variant

RESERVED = ("published", "bench")  # folders under results/ and figures/ that belong to no run


class Config(Gpt2Jobs, Strict):
    """One run of the whole pipeline."""

    run: RunName  # folder name under results/ and figures/
    caption: str  # printed under every table and figure of the run; states the scale
    seeds: tuple[Seed, ...]
    data: DataConfig
    tokenizer: TokenizerConfig
    model: ModelConfig
    widths: tuple[WidthConfig, ...]
    train: TrainConfig
    taper: TaperConfig
    bench: BenchConfig
    gpt2: Gpt2Config | None  # the GPT-2 track, Table 3; null: left out
    study: tuple[Stage, ...] | None  # stages of the study beyond the paper; null: left out
    robustness: Robustness | None  # Table S3, odd inputs, also beyond the paper; null: left out
    hardware: HardwareConfig
    assumptions: tuple[Assumption, ...]

    @field_validator("run")
    @classmethod
    def _run_is_no_other_folder(cls, run: str) -> str:
        if run.lower() in RESERVED:
            raise ValueError(f"{run!r} is a reserved folder of results/: take a name other than {', '.join(RESERVED)}")
        return run

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        return distinct("seeds", seeds)

    @field_validator("widths")
    @classmethod
    def _widths_differ(cls, widths: tuple[WidthConfig, ...]) -> tuple[WidthConfig, ...]:
        distinct("widths' d_model", [w.d_model for w in widths])
        for width in widths:
            distinct(f"variants at d_model {width.d_model}", width.variants)
        return widths

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        if (self.hardware.micro_batch or 0) > self.train.batch:
            raise ValueError(
                f"hardware.micro_batch ({self.hardware.micro_batch}) exceeds train.batch ({self.train.batch}): "
                "lower it, or set it to null for the whole batch at once"
            )
        anchored = any(variant.anchored for width in self.widths for variant in width.variants)
        if anchored and self.taper.anchor_weight == 0:
            raise ValueError(
                "taper.anchor_weight is 0, but some variants are (+aux): set a positive weight, or remove them"
            )
        return self

    @model_validator(mode="after")
    def _devices_share_every_batch(self) -> Self:
        shared = {"train.batch": (self.train.batch, self.hardware.devices_per_job)}
        for size in self.gpt2.sizes if self.gpt2 else ():
            shared[f"batch of the size {size.name}"] = (size.batch, size.devices_per_job)
            if size.fresh:
                batch = size.fresh.train.batch
                shared[f"fresh.train.batch of the size {size.name}"] = (batch, self.hardware.devices_per_job)
        for name, (batch, devices) in shared.items():
            if batch % devices:
                raise ValueError(
                    f"devices_per_job ({devices}) does not divide {name} ({batch}): set it to a divisor, because every "
                    "device takes an equal share of the rows"
                )
        return self

    @model_validator(mode="after")
    def _searches_use_other_seeds(self) -> Self:
        stages = self.study or ()
        if stages:
            distinct("stages of the study", [stage.name for stage in stages])
        reported = {seed for stage in stages if not stage.search for seed in stage.seeds} | set(self.seeds)
        for stage in stages:
            if stage.search and (shared := sorted(reported.intersection(stage.seeds))):
                raise ValueError(
                    f"stage {stage.name} searches on seeds {shared}, which tables report: give the search other seeds "
                    "than the runs that report its choice"
                )
        return self

    @model_validator(mode="after")
    def _every_job_is_possible(self) -> Self:
        for cell in self.pretrain_cells():
            self.pretrain_job(*cell)
        for method, size, seed in self.finetune_cells():
            devices = self._size(size).devices_per_job
            self.finetune_job(method, size, seed).require_whole_micro_batches(devices)
        for stage, arm, seed in self.study_cells():
            try:
                self.arm_job(stage, arm, seed)
            except ValueError as error:
                raise ValueError(f"stage {stage.name}, arm {arm.name}: {error}") from None
        for d_model, seed in self.robustness_cells():
            self.robustness_job(d_model, seed)
        for name in self.robustness.stages if self.robustness else ():
            try:
                self.stage_robustness_job(name, self.stage(name).seeds[0])
            except UserError as error:
                raise ValueError(f"robustness.stages: {error}") from None
        return self

    @model_validator(mode="after")
    def _assumptions_name_settings(self) -> Self:
        for assumption in self.assumptions:
            if assumption.setting is not None and not _has_setting(self, assumption.setting.split(".")):
                raise ValueError(
                    f"assumptions: {assumption.setting!r} names no setting of this config: give a dotted path, or null"
                )
        return self

    @property
    def texts(self) -> list[DataConfig]:
        """List every text that the run reads."""
        gpt2 = (*self.gpt2.base_text, *self.gpt2.text) if self.gpt2 else ()
        scored = [data for corpus in self.gpt2.corpora for data in corpus.text] if self.gpt2 else []
        odd = [data for text in self.robustness.texts for data in text.data] if self.robustness else []
        return [self.data, *gpt2, *scored, *odd]

    @property
    def most_devices(self) -> int:
        """Number of devices that the largest training job takes."""
        sizes = self.gpt2.sizes if self.gpt2 else ()
        return max([self.hardware.devices_per_job, *(size.devices_per_job for size in sizes)])

    def width(self, d_model: int) -> WidthConfig:
        """Return the section of a width.

        Raises:
            UserError: the config has no such width.
        """
        for width in self.widths:
            if width.d_model == d_model:
                return width
        raise UserError(f"no width {d_model} in this config; it has {[w.d_model for w in self.widths]}")

    def corpus_job(self) -> CorpusJob:
        """Return the job that reads the pre-training text."""
        return CorpusJob(data=(self.data,))

    def tokenizer_job(self) -> TokenizerJob:
        """Return the job that trains the tokenizer."""
        return TokenizerJob(tokenizer=self.tokenizer)

    def tokens_job(self) -> TokensJob:
        """Return the job that tokenizes the pre-training text."""
        return TokensJob(context=self.model.context)

    def report_job(self) -> ReportJob:
        """Return the job of any table or figure of the run."""
        labels = {width.d_model: width.label for width in self.widths}
        return ReportJob(run=self.run, caption=self.caption, labels=labels, clip_norm=self.train.clip_norm)

    def claims_job(self) -> ClaimsJob:
        """Return the job of the table of claims."""
        return ClaimsJob(run=self.run, caption=self.caption, text=self.data.source)

    def settings_job(self) -> SettingsJob:
        """Return the job of Tables 4 and 5."""
        return SettingsJob(**{name: getattr(self, name) for name in SettingsJob.model_fields})

    def bench_job(self) -> BenchJob:
        """Return the job of the decoding benchmark."""
        return BenchJob(run=self.run, bench=self.bench)

    @property
    def benched(self) -> tuple[Variant, int, int] | None:
        """Return the (variant, width, seed) of the decoding benchmark: the widest Internal-Taper (+aux), or None."""
        timed = Variant("internal", "absolute")
        widths = [w.d_model for w in self.widths if timed in w.variants]
        return (timed, max(widths), self.seeds[0]) if widths else None

    def pretrain_job(self, variant: Variant | str, d_model: int, seed: int) -> PretrainJob:
        """Return the job of one (variant or its name, width, seed), with only the settings that the variant reads."""
        variant, width = Variant.named(str(variant)), self.width(d_model)
        unanchored = self.taper.model_copy(update={"anchor_weight": 0.0})
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
            taper=None if variant.plain else self.taper if variant.anchored else unanchored,
        )

    def pretrain_cells(self) -> list[tuple[Variant, int, int]]:
        """List every (variant, width, seed) of the run, widest first."""
        widths = sorted(self.widths, key=lambda w: -w.d_model)
        return [(v, w.d_model, s) for w in widths for v in w.variants for s in self.seeds]

    def study_cells(self) -> list[tuple[Stage, Arm, int]]:
        """List every (stage, arm, seed) of the study."""
        return [(stage, arm, seed) for stage in self.study or () for arm in stage.arms for seed in stage.seeds]

    def arm_job(self, stage: Stage, arm: Arm, seed: int) -> ArmJob:
        """Return the job of one (stage, arm, seed)."""
        return arm.job(self.pretrain_job(arm.variant, stage.d_model, seed))

    def stage(self, name: str) -> Stage:
        """Return the stage of this name.

        Raises:
            UserError: the study has no such stage.
        """
        stages = {stage.name: stage for stage in self.study or ()}
        if name not in stages:
            raise UserError(f"no stage {name!r} in the study of this config; it has {', '.join(stages) or 'none'}")
        return stages[name]

    def robustness_cells(self) -> list[tuple[int, int]]:
        """List every (width, seed) that is scored on odd inputs: the widths that have a Baseline, widest first."""
        if self.robustness is None:
            return []
        widths = sorted((w for w in self.widths if any(v.plain for v in w.variants)), key=lambda w: -w.d_model)
        return [(w.d_model, seed) for w in widths for seed in self.seeds]

    def robustness_job(self, d_model: int, seed: int) -> RobustnessJob:
        """Return the job that scores the models of one width and seed on odd inputs."""
        models = {variant.name: variant.label for variant in self.width(d_model).variants}
        return self._robustness_job(d_model, seed, models)

    def stage_robustness_job(self, name: str, seed: int) -> RobustnessJob:
        """Return the job that scores a stage's arms of one seed on odd inputs.

        Raises:
            UserError: the stage is unknown or a search, or its baseline has another name than baseline.
        """
        stage = self.stage(name)
        if stage.search or stage.baseline != BASELINE:
            raise UserError(
                f"stage {name} cannot be scored on odd inputs: that needs `search: false` and a baseline arm named"
                f" {BASELINE}"
            )
        return self._robustness_job(stage.d_model, seed, stage.labels)

    def odd_inputs_report_job(self, name: str | None) -> OddInputsReportJob:
        """Return the job that reports Table S3 for the arms of a stage, or with None for the run's own models."""
        if name is None:
            cells, labels = self.robustness_cells(), dict(VARIANT_LABELS)
        else:
            stage = self.stage(name)
            cells, labels = [(stage.d_model, seed) for seed in stage.seeds], stage.labels
        return OddInputsReportJob(run=self.run, caption=self.caption, stage=name, cells=tuple(cells), models=labels)

    def _robustness_job(self, d_model: int, seed: int, models: dict[str, str]) -> RobustnessJob:
        if self.robustness is None:
            raise UserError("this config scores no model on odd inputs: its `robustness` is null")
        return RobustnessJob(
            d_model=d_model,
            seed=seed,
            models=models,
            context=self.model.context,
            robustness=self.robustness.odd_inputs,
        )


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
