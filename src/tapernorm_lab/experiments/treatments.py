"""Beyond the paper: apply an arm's treatment (`config.study.Treatment`) to a model and its taper.

model = Decoder(job.pretrain.model).initialize(...)
prepare(model, job.treatment)
taper = attach_arm(model, job, validate)
"""

from collections.abc import Callable

from torch import nn

from tapernorm.models.decoder import Decoder
from tapernorm.norms import TaperNorm
from tapernorm.taper import Taper

from ..config.study import ArmJob, Treatment
from ..models.c_per_feature import make_featurewise
from ..models.dyt_derf import replace_norms, scale_embedding
from ..models.logit_temperature import temper
from ..training.validation_loss import Evaluation
from .pretrain import attach_variant
from .taper_start_jump import ScoredTaper


def prepare(model: Decoder, treatment: Treatment | None) -> None:
    """Change the modules of a fresh model, in place, before a taper is attached; None changes nothing.

    The initial matrices stay, so that all arms of a seed start from the same ones.

    Raises:
        UserError: two changes exclude each other.
    """
    if treatment is None:
        return
    if (replacement := treatment.norm) is not None:
        replace_norms(
            model,
            replacement.kind,
            alpha=replacement.alpha_init,
            attention_alpha=replacement.attention_alpha_init,
            final_gain=replacement.final_gain_init or 1.0,
        )
        if replacement.embedding_scale:
            scale_embedding(model, replacement.embedding_scale_init)
    if treatment.embedding_scale:
        scale_embedding(model)
    if treatment.final_gain_init is not None:
        nn.init.constant_(model.model.norm.weight, treatment.final_gain_init)
    if treatment.temperature:
        temper(model.model.norm)


def attach_arm(model: Decoder, job: ArmJob, validate: Callable[[], Evaluation]) -> Taper | None:
    """Attach the arm's taper, changed by its treatment; return None for an arm with neither taper nor scale loss.

    Args:
        validate: scores the present model; called twice at the start of the taper (`ScoredTaper`) if norms are tapered.

    Raises:
        UserError: a norm to be tapered is not a plain norm.
    """
    taper = attach_variant(model, job.pretrain, kind=ScoredTaper if job.pretrain.variant.tapers else Taper)
    if taper is None:
        return None
    if job.treatment is not None and job.treatment.calibration == "vector":
        for norm in map(model.get_submodule, taper.swapped):
            assert isinstance(norm, TaperNorm)
            make_featurewise(norm)
    if isinstance(taper, ScoredTaper):
        taper.validate = validate
    return taper
