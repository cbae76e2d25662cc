"""Table S3: which finished models are tried on what besides text of their own kind, and the jobs that this takes."""

from itertools import pairwise
from typing import Self

from pydantic import model_validator

from .gpt2 import Name
from .jobs import BlocksJob, CorpusJob
from .sections import (
    AtLeastTwo,
    DataConfig,
    Label,
    PositiveInt,
    Seed,
    Strict,
    distinct,
)
from .study import StageName

BASELINE = "baseline"  # the model that the others of its width and seed are compared with
TIMES = 2.0  # a row blows up above so many times the Baseline's loss on it, see robustness.blown
HELD_OUT, RARE, NEVER_SEEN, LONGER = "held_out", "rare", "never_seen", "longer"  # what is tried besides the texts


class OddText(Strict):
    """A text of another kind than the one that was trained on; its validation split is scored."""

    name: Name  # folder name
    label: Label  # in tables
    data: tuple[DataConfig, ...]


class OddInputs(Strict):
    """What finished models are scored on, row by row; the run's own held-out text always is."""

    seed: Seed  # draws rows and tokens, the same for every model
    max_rows: PositiveInt  # of each kind, drawn where there are more
    rare_tokens: PositiveInt  # repeated are the rarest so many of those that the training text has
    repeat: AtLeastTwo  # times in a row that such a token stands
    lengths: tuple[PositiveInt, ...]  # tokens, beyond the training context, ascending
    position_bin: PositiveInt  # positions that a point of the figure averages over
    texts: tuple[OddText, ...]

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        distinct(
            "names of robustness.texts and of the other trials",
            [HELD_OUT, RARE, NEVER_SEEN, LONGER, *(text.name for text in self.texts)],
        )
        distinct("robustness.lengths", self.lengths)
        if any(later < sooner for sooner, later in pairwise(self.lengths)):
            raise ValueError(f"robustness.lengths {list(self.lengths)} are not in ascending order: sort them")
        return self

    def text(self, name: str) -> OddText:
        return next(text for text in self.texts if text.name == name)

    def corpus_job(self, name: str) -> CorpusJob:
        """The job that reads one of the texts."""
        return CorpusJob(data=self.text(name).data)

    def blocks_job(self, context: int) -> BlocksJob:
        """The job that cuts such a text into rows of `context` tokens and the last one's target."""
        return BlocksJob(context=context + 1, block_documents=None, max_rows=self.max_rows)


class Robustness(OddInputs):
    """A config's section: what is tried, and on whom besides the models of the run's own tables."""

    stages: tuple[StageName, ...]  # of the study: their arms are tried too, beside that named baseline

    @model_validator(mode="after")
    def _stages_differ(self) -> Self:
        if self.stages:
            distinct("robustness.stages", self.stages)
        return self

    @property
    def odd_inputs(self) -> OddInputs:
        return OddInputs(**{name: getattr(self, name) for name in OddInputs.model_fields})


class RobustnessJob(Strict):
    """What defines the scores of all models of one width and seed, or of a stage and seed, models and text apart."""

    d_model: PositiveInt
    seed: Seed
    models: dict[str, str]  # name -> label; they are compared with the one named baseline
    context: AtLeastTwo  # tokens that the models were trained on
    robustness: OddInputs

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        odd, context = self.robustness, self.context
        if BASELINE not in self.models:
            raise ValueError(f"the models are {', '.join(self.models)}, and none is the {BASELINE} of the others")
        if self.place + odd.repeat > context:
            raise ValueError(
                f"robustness.repeat ({odd.repeat}) from token {self.place} on leaves no text after it in a context of "
                f"{context}: lower it to at most {context - self.place}"
            )
        if odd.lengths[0] <= context:
            raise ValueError(
                f"robustness.lengths {list(odd.lengths)} must all exceed the training context of {context}, which is "
                "scored anyway"
            )
        if uneven := [length for length in (context, *odd.lengths) if length % odd.position_bin]:
            raise ValueError(
                f"robustness.position_bin ({odd.position_bin}) does not divide {', '.join(map(str, uneven))}: context "
                "and lengths are cut into bins of it"
            )
        return self

    @property
    def place(self) -> int:
        """Position of the first repeated token in its row: at a quarter of the context."""
        return max(1, self.context // 4)


class OddInputsReportJob(Strict):
    """What Table S3 says about its run, and whose it is."""

    run: str
    caption: str
    stage: StageName | None  # whose arms it is about; null: the models of the run's own tables
    cells: tuple[tuple[int, Seed], ...]  # (d_model, seed) that must have been scored, and no other
    models: dict[str, str]  # name -> label

    @property
    def name(self) -> str:
        """The table's, in the names of its files: S3, or S3_S2 of the arms of stage S2."""
        return "S3" if self.stage is None else f"S3_{self.stage}"
