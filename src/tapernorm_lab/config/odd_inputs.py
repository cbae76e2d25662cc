"""Settings and jobs of Table S3, which scores finished models on odd inputs: other texts, rare tokens, longer rows."""

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
TIMES = 2.0  # a row counts as blown up if its loss exceeds this multiple of the Baseline's loss on the same row
HELD_OUT, RARE, NEVER_SEEN, LONGER = "held_out", "rare", "never_seen", "longer"  # trials besides the texts


class OddText(Strict):
    """A text of another kind than the training text; its validation split is scored."""

    name: Name  # folder name
    label: Label  # in tables
    data: tuple[DataConfig, ...]


class OddInputs(Strict):
    """The inputs that finished models are scored on, row by row, besides the run's own held-out text."""

    seed: Seed  # seed of the draw of rows and tokens, the same for every model
    max_rows: PositiveInt  # rows per kind of input; drawn at random if there are more
    rare_tokens: PositiveInt  # number of the rarest tokens of the training text that are repeated
    repeat: AtLeastTwo  # consecutive repetitions of such a token in its row
    lengths: tuple[PositiveInt, ...]  # row lengths in tokens, ascending, all above the training context
    position_bin: PositiveInt  # positions that one point of the figure averages over
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
        """Return the job that reads one of the texts."""
        return CorpusJob(data=self.text(name).data)

    def blocks_job(self, context: int) -> BlocksJob:
        """Return the job that cuts such a text into rows of `context` tokens and the last token's target."""
        return BlocksJob(context=context + 1, block_documents=None, max_rows=self.max_rows)


class Robustness(OddInputs):
    """The config section `robustness`: the odd inputs, and the models that are scored on them.

    The models of the run's own tables are always scored.
    """

    stages: tuple[StageName, ...]  # stages of the study whose arms are scored too, each with an arm named baseline

    @model_validator(mode="after")
    def _stages_differ(self) -> Self:
        if self.stages:
            distinct("robustness.stages", self.stages)
        return self

    @property
    def odd_inputs(self) -> OddInputs:
        return OddInputs(**{name: getattr(self, name) for name in OddInputs.model_fields})


class RobustnessJob(Strict):
    """The settings that define the scores of all models of one width and seed, or of one stage and seed.

    Weights and texts are inputs of their own.
    """

    d_model: PositiveInt
    seed: Seed
    models: dict[str, str]  # name -> label; they are compared with the one named baseline
    context: AtLeastTwo  # training context of the models, in tokens
    robustness: OddInputs

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        odd, context = self.robustness, self.context
        if BASELINE not in self.models:
            raise ValueError(
                f"the models {', '.join(self.models)} are compared with one named {BASELINE}: add it to them"
            )
        if self.place + odd.repeat > context:
            raise ValueError(
                f"robustness.repeat ({odd.repeat}) starts at token {self.place} and exceeds the context of {context} "
                f"tokens: lower it to at most {context - self.place}"
            )
        if odd.lengths[0] <= context:
            raise ValueError(
                f"robustness.lengths {list(odd.lengths)} must all exceed the training context of {context}, which is "
                "always scored: remove the others"
            )
        if uneven := [length for length in (context, *odd.lengths) if length % odd.position_bin]:
            raise ValueError(
                f"robustness.position_bin ({odd.position_bin}) does not divide {', '.join(map(str, uneven))}: set it "
                "to a divisor of the context and of all robustness.lengths"
            )
        return self

    @property
    def place(self) -> int:
        """Position of the first repeated token in its row: at a quarter of the context."""
        return max(1, self.context // 4)


class OddInputsReportJob(Strict):
    """The facts that Table S3 states about its run, and the models that it reports."""

    run: str
    caption: str
    stage: StageName | None  # stage whose arms are reported; null: the models of the run's own tables
    cells: tuple[tuple[int, Seed], ...]  # every (d_model, seed) that must have been scored; no other may be
    models: dict[str, str]  # name -> label

    @property
    def name(self) -> str:
        """Name of the table in its file names: S3, or for example S3_S2 for the arms of stage S2."""
        return "S3" if self.stage is None else f"S3_{self.stage}"
