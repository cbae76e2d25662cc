"""Every figure by its name: what draws it, of the rows of its source and the job, or of a taper's label."""

from collections.abc import Callable
from typing import Any

from .decoding import FIGURE_DECODE
from .figure import Drawing
from .finetuning import FIGURE_FINETUNE
from .odd_inputs import FIGURE_S3
from .pretraining import FIGURE1A, FIGURE1B, FIGURE2
from .study_stages import draw as draw_stage
from .token_scales import FIGURE_SPREAD

FIGURES: dict[str, Callable[[Any, Any], Drawing]] = {  # `{stage}`: of the study, or the label of a taper
    "figure1a": FIGURE1A.draw,
    "figure1b": FIGURE1B.draw,
    "figure2": FIGURE2.draw,
    "figure_decode": FIGURE_DECODE.draw,
    "figure_finetune": FIGURE_FINETUNE.draw,
    "figure_S3": FIGURE_S3.draw,
    "figure_{stage}": draw_stage,
    "figure_spread_{stage}": FIGURE_SPREAD.draw,
}
