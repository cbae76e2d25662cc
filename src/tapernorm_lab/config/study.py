"""Beyond the paper: stages of a study, their arms, and what an arm changes. None is a row of the paper's tables.

An arm is a variant with some settings of its own and, where that is not enough, a treatment. Its losses are paired by
seed with those of its stage's baseline.
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

RESERVED = ("S0", "S3", "S3x", "figures", "oddities", "trials", "positions")  # targets, tables and rows of no stage


def _free(name: str) -> str:
    if name in RESERVED:
        raise ValueError(f"no stage may be called {name!r}: {', '.join(RESERVED)} are made by rules of their own")
    return name


StageName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$", max_length=NAME_LENGTH), AfterValidator(_free)]
SETTINGS = ("steps", "train", "taper")  # what an arm may change of its job; of the last two, any number in them


class _Sparse(Strict):
    """Serialised without the fields that are at their default, so that one added later alters no earlier identity."""

    @model_serializer(mode="wrap")
    def _changes_alone(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {name: value for name, value in dump(self).items() if getattr(self, name) != fields[name].default}


class NormReplacement(_Sparse):
    """A map without statistics that stands where every RMSNorm was, from the first step on: nothing is tapered.

    `final_gain_init` departs from the authors, whose gamma starts at 1 in every place. The final map bounds each value
    that the head reads by gamma, so its logits by gamma sum_d |W_dv|, about 0.8 * 0.02 * gamma D where the head is
    drawn from normal(0, 0.02): by 12 at a width of 768, but by 1 at 64, where no distribution over tokens can be far
    from the uniform one until gamma and the head have grown, and the map saturates meanwhile. A gain of 8 restores at
    64 what 1 gives at 512.
    """

    kind: Literal["dyt", "derf"]  # gamma tanh(alpha x) + beta; gamma erf(alpha x + s) + beta
    alpha_init: Annotated[float, Field(gt=0)]  # of the norms before MLPs and of the final one
    attention_alpha_init: Annotated[float, Field(gt=0)]  # of the norms before attention
    embedding_scale: bool  # a learned scalar on the embeddings
    embedding_scale_init: Annotated[float, Field(gt=0)] | None = None  # where it starts; null: sqrt(d_model), as theirs
    final_gain_init: Annotated[float, Field(gt=0)] | None = None  # gamma of the final map at first; null: 1, as theirs

    @model_validator(mode="after")
    def _starts_what_is_there(self) -> Self:
        if self.embedding_scale_init is not None and not self.embedding_scale:
            raise ValueError("embedding_scale_init is where embedding_scale starts, and that is false: leave it null")
        return self


class Treatment(_Sparse):
    """What an arm changes beyond settings. A field that is left out is as in the paper."""

    norm: NormReplacement | None = None  # in the place of every norm; null: the model's own
    embedding_scale: bool = False  # a learned scalar on the embeddings, at first sqrt(d_model); norms stay
    final_gain_init: Annotated[float, Field(gt=0)] | None = None  # gamma of the final norm at first; null: 1
    temperature: bool = False  # logits times a learned function of their token's pre-logit stream
    calibration: Literal["scalar", "vector"] = "scalar"  # c per norm, or per feature of a norm

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.model_dump():
            raise ValueError("this treatment changes nothing: leave it null")
        return self


# How a job is written whose variant is none of the paper's: one of those, and the rest in the treatment. Finished runs
# are known by the hash of this text.
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
    """What defines the numbers of one training run of an arm, its token stream apart."""

    pretrain: PretrainJob  # with the arm's settings in it
    treatment: Treatment | None

    @model_validator(mode="after")
    def _treatment_fits(self) -> Self:
        if self.treatment is None:
            return self
        variant, treatment = self.pretrain.variant, self.treatment
        faults = {
            "norm replaces every norm: taper none, anchor none": treatment.norm and not variant.plain,
            "norm has embedding_scale and final_gain_init of its own": treatment.norm
            and (treatment.embedding_scale or treatment.final_gain_init),
            "calibration is of tapered norms: any taper but none": treatment.calibration != "scalar"
            and not variant.tapers,
        }
        if found := [rule for rule, broken in faults.items() if broken]:
            raise ValueError(f"variant {variant} does not go with its treatment: {'; '.join(found)}")
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
    """One line of a stage: a variant, with changed settings and a treatment where it has them."""

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
        """The arm's job, from the job of its variant, width and seed without changes.

        Raises:
            ValueError: a setting that this job has not, or cannot have.
        """
        return ArmJob(pretrain=changed(plain, self.set), treatment=self.treatment)


class Stage(Strict):
    """Arms that are compared at one width, on the same seeds."""

    name: StageName
    title: Label  # what the stage asks, printed with its tables
    search: bool  # it picks a setting that another stage reports: its seeds are those of no other stage
    figure: Literal["window", "scale_target"] | None  # what it draws gaps by; window: start and end of the taper
    d_model: PositiveInt  # one of the config's widths
    seeds: tuple[Seed, ...]
    baseline: Name  # the arm that the others' gaps are measured against, paired by seed
    arms: tuple[Arm, ...]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        distinct(f"seeds of stage {self.name}", self.seeds)
        names = distinct(f"arms of stage {self.name}", tuple(arm.name for arm in self.arms))
        if self.baseline not in names:
            raise ValueError(f"the baseline of stage {self.name} is {self.baseline!r}, and its arms are {list(names)}")
        return self

    @property
    def labels(self) -> dict[str, str]:
        """Name of each arm -> its label, with the name where other arms are labelled alike."""
        counts = Counter(arm.label for arm in self.arms)
        return {arm.name: arm.label if counts[arm.label] == 1 else f"{arm.label} ({arm.name})" for arm in self.arms}

    def arm(self, name: str) -> Arm:
        """The arm of that name.

        Raises:
            UserError: the stage has none.
        """
        arms = {arm.name: arm for arm in self.arms}
        if name not in arms:
            raise UserError(f"no arm {name!r} in stage {self.name}; it has {', '.join(arms)}")
        return arms[name]


def changed(job: PretrainJob, settings: Mapping[str, float]) -> PretrainJob:
    """`job` with dotted settings replaced.

    Raises:
        ValueError: a name is none of the job's numbers, or the changed job is impossible.
    """
    content = job.model_dump(mode="json")
    known = [name for name in SETTINGS if isinstance(content[name], int)]
    known += [f"{s}.{key}" for s in SETTINGS for key, v in _section(content, s).items() if isinstance(v, int | float)]
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
