"""The study beyond the paper: its stages, their arms, and the changes of an arm.

An arm is a variant with changed settings and, where settings do not suffice, a treatment. Its losses are paired by
seed with those of its stage's baseline. The paper's tables contain no arm.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from tapernorm.util.errors import UserError

from .gpt2 import Name
from .jobs import PretrainJob
from .sections import (
    NAME_LENGTH,
    Label,
    PositiveInt,
    Seed,
    Strict,
    distinct,
)
from .variants import Anchor, TaperedNorms, Variant

RESERVED = ("S0", "S3", "S3x", "figures", "oddities", "trials", "positions")  # names of other targets, tables and rows


def _free(name: str) -> str:
    if name in RESERVED:
        raise ValueError(f"a stage cannot be named {name!r}: the names {', '.join(RESERVED)} are reserved")
    return name


StageName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$", max_length=NAME_LENGTH), AfterValidator(_free)]
SETTINGS = ("steps", "train", "taper")  # settings of the job that an arm may change: steps, and numbers in the others


class _Sparse(Strict):
    """A model that is serialised without fields at their default, so that a new field changes no existing identity."""

    @model_serializer(mode="wrap")
    def _changes_alone(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {name: value for name, value in dump(self).items() if getattr(self, name) != fields[name].default}


class NormReplacement(_Sparse):
    """A map without statistics that replaces every RMSNorm from the first step on. Nothing is tapered.

    `final_gain_init` departs from the authors, whose gamma always starts at 1. The final map bounds its outputs by
    gamma, and therefore the logits by gamma sum_d |W_dv|. For a head drawn from normal(0, 0.02) that bound is about 0.8
    * 0.02 * gamma D. It is 12 at width 768, but 1 at width 64. At width 64 the predictions stay close to uniform until
    gamma and the head have grown, and the map saturates meanwhile. A gain of 8 at width 64 restores the bound that a
    gain of 1 gives at width 512.
    """

    kind: Literal["dyt", "derf"]  # dyt: gamma tanh(alpha x) + beta; derf: gamma erf(alpha x + s) + beta
    alpha_init: Annotated[float, Field(gt=0)]  # initial alpha of the maps before MLPs and of the final map
    attention_alpha_init: Annotated[float, Field(gt=0)]  # initial alpha of the maps before attention
    embedding_scale: bool  # multiply the embeddings by a learned scalar
    embedding_scale_init: Annotated[float, Field(gt=0)] | None = (
        None  # initial scalar; null: sqrt(d_model), as published
    )
    final_gain_init: Annotated[float, Field(gt=0)] | None = (
        None  # initial gamma of the final map; null: 1, as published
    )

    @model_validator(mode="after")
    def _starts_what_is_there(self) -> Self:
        if self.embedding_scale_init is not None and not self.embedding_scale:
            raise ValueError("embedding_scale_init has no effect while embedding_scale is false: set it to null")
        return self


class Treatment(_Sparse):
    """The changes of an arm beyond settings. A field that is left out keeps the paper's value."""

    norm: NormReplacement | None = None  # replaces every norm; null: the model's own norms
    embedding_scale: bool = False  # multiply the embeddings by a learned scalar, initially sqrt(d_model); norms stay
    final_gain_init: Annotated[float, Field(gt=0)] | None = None  # initial gamma of the final norm; null: 1
    temperature: bool = False  # multiply the logits by a learned function of their token's pre-logit stream
    calibration: Literal["scalar", "vector"] = "scalar"  # one c per norm, or one per feature of a norm

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.model_dump():
            raise ValueError("this treatment changes nothing: set it to null")
        return self


# A job whose variant is not one of the paper's is written as a paper variant, with the difference in its treatment.
# The hash of this text identifies finished runs, so the mapping must not change.
_WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "baseline_aux": ("internal_aux", {"anchor_only": True}),
    "baseline_relative": ("internal_aux", {"anchor_only": True, "anchor": "relative"}),
    "internal_relative": ("internal_aux", {"anchor": "relative"}),
    "final": ("all", {"sites": "final"}),
    "final_aux": ("all_aux", {"sites": "final"}),
    "final_relative": ("all_aux", {"sites": "final", "anchor": "relative"}),
    "all_relative": ("all_aux", {"anchor": "relative"}),
}


class ArmJob(Strict):
    """The settings that define the numbers of one training run of an arm, besides its token stream."""

    pretrain: PretrainJob  # includes the arm's changed settings
    treatment: Treatment | None

    @model_validator(mode="after")
    def _treatment_fits(self) -> Self:
        if self.treatment is None:
            return self
        variant, treatment = self.pretrain.variant, self.treatment
        faults = {
            "norm replaces every norm, so set taper: none and anchor: none": treatment.norm and not variant.plain,
            "norm has embedding_scale and final_gain_init of its own, so set those": treatment.norm
            and (treatment.embedding_scale or treatment.final_gain_init),
            "calibration needs tapered norms, so set any taper but none": treatment.calibration != "scalar"
            and not variant.tapers,
        }
        if found := [rule for rule, broken in faults.items() if broken]:
            raise ValueError(f"variant {variant} does not fit its treatment: {'; '.join(found)}")
        return self

    @model_serializer(mode="wrap")
    def _written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content = dump(self)
        if found := _WRITTEN.get(content["pretrain"]["variant"]):
            content["pretrain"]["variant"], more = found
            content["treatment"] = (content["treatment"] or {}) | more
        return content

    @model_validator(mode="before")
    @classmethod
    def _read(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or not isinstance(raw.get("treatment"), dict):
            return raw
        more = {key: value for key, value in raw["treatment"].items() if key in ("anchor", "anchor_only", "sites")}
        for name, written in _WRITTEN.items():
            if written == (raw["pretrain"]["variant"], more):
                rest = {key: value for key, value in raw["treatment"].items() if key not in more}
                return {"pretrain": raw["pretrain"] | {"variant": name}, "treatment": rest or None}
        return raw


class Arm(Strict):
    """One line of a stage: a variant, with optional changed settings and an optional treatment."""

    name: Name  # folder name
    label: Label  # in tables
    taper: TaperedNorms
    anchor: Anchor
    set: dict[str, float] = Field(default_factory=dict)  # dotted setting of the job -> its value in this arm
    treatment: Treatment | None = None

    @property
    def variant(self) -> Variant:
        return Variant(self.taper, self.anchor)

    def job(self, plain: PretrainJob) -> ArmJob:
        """Return the arm's job, from the unchanged job of its variant, width and seed.

        Raises:
            ValueError: the job has no such setting, or the changed job is impossible.
        """
        return ArmJob(pretrain=changed(plain, self.set), treatment=self.treatment)


class Stage(Strict):
    """Arms that are compared at one width, on the same seeds."""

    name: StageName
    title: Label  # the stage's question, printed with its tables
    search: bool  # whether it picks a setting that another stage reports; its seeds must then be reported nowhere
    figure: Literal["window", "scale_target"] | None  # axis of its figure of gaps; window: start and end of the taper
    d_model: PositiveInt  # one of the config's widths
    seeds: tuple[Seed, ...]
    baseline: Name  # the arm that the others' gaps are measured against, paired by seed
    arms: tuple[Arm, ...]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        distinct(f"seeds of stage {self.name}", self.seeds)
        names = distinct(f"arms of stage {self.name}", tuple(arm.name for arm in self.arms))
        if self.baseline not in names:
            raise ValueError(
                f"the baseline {self.baseline!r} of stage {self.name} is not one of its arms: {', '.join(names)}"
            )
        return self

    @property
    def labels(self) -> dict[str, str]:
        """Return a mapping from arm name to label; equal labels are told apart by the appended name."""
        counts = Counter(arm.label for arm in self.arms)
        return {arm.name: arm.label if counts[arm.label] == 1 else f"{arm.label} ({arm.name})" for arm in self.arms}

    def arm(self, name: str) -> Arm:
        """Return the arm of this name.

        Raises:
            UserError: the stage has no such arm.
        """
        arms = {arm.name: arm for arm in self.arms}
        if name not in arms:
            raise UserError(f"no arm {name!r} in stage {self.name}; it has {', '.join(arms)}")
        return arms[name]


def changed(job: PretrainJob, settings: Mapping[str, float]) -> PretrainJob:
    """Return `job` with dotted settings replaced.

    Raises:
        ValueError: a name is not a numeric setting of the job, or the changed job is impossible.
    """
    content = job.model_dump(mode="json")
    known = [name for name in SETTINGS if isinstance(content[name], int)]
    numbers = int | float | None  # an ema_rate of null may become a number
    known += [f"{s}.{key}" for s in SETTINGS for key, v in _section(content, s).items() if isinstance(v, numbers)]
    if unknown := settings.keys() - set(known):
        raise ValueError(
            f"an arm of variant {job.variant} cannot set {', '.join(sorted(unknown))}; it has {', '.join(known)}"
        )
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        (content[section] if section else content)[key] = value
    return PretrainJob.model_validate(content)


def _section(content: Mapping[str, object], name: str) -> dict[str, object]:
    section = content[name]
    return section if isinstance(section, dict) else {}
