"""Find the job that command-line options select among those of a config; refuse a choice that the config lacks."""

from collections.abc import Collection

from tapernorm.util.errors import UserError

from .gpt2 import Method
from .jobs import FinetuneJob, PretrainJob
from .odd_inputs import RobustnessJob
from .run import Config
from .study import ArmJob


def pretrain_job(config: Config, variant: str, d_model: int, seed: int) -> PretrainJob:
    """Return the job of `tapernorm pretrain --variant --width --seed`.

    Raises:
        UserError: the config has no such variant, width or seed.
    """
    _require("variant", variant, [str(known) for known in config.width(d_model).variants], f"width {d_model}")
    _require_seed(seed, config.seeds, "this config", "seeds")
    return config.pretrain_job(variant, d_model, seed)


def arm_job(config: Config, stage: str, arm: str, seed: int) -> ArmJob:
    """Return the job of `tapernorm pretrain --stage --arm --seed`.

    Raises:
        UserError: the config has no such stage, arm or seed.
    """
    chosen = config.stage(stage)
    found = chosen.arm(arm)
    _require_seed(seed, chosen.seeds, f"stage {stage}")
    return config.arm_job(chosen, found, seed)


def finetune_job(config: Config, method: Method, size: str, seed: int) -> FinetuneJob:
    """Return the job of `tapernorm finetune --method --size --seed`.

    Raises:
        UserError: the config has no GPT-2 track, or no such method, size or seed in it.
    """
    job = config.finetune_job(method, size, seed)  # raises UserError if the config has no such size
    assert config.gpt2 is not None
    _require("method", method, config.gpt2.methods, "the GPT-2 track")
    _require_seed(seed, config.gpt2.seeds, "the GPT-2 track", "gpt2.seeds")
    return job


def robustness_job(config: Config, d_model: int, seed: int) -> RobustnessJob:
    """Return the job of `tapernorm evaluate --models --width --seed`.

    Raises:
        UserError: the config has no `robustness` section, no such width or seed, or no Baseline at that width.
    """
    config.width(d_model)
    if config.robustness is not None:
        _require("width", d_model, dict(config.robustness_cells()), "the widths with a Baseline, which Table S3 needs")
        _require_seed(seed, config.seeds, "this config", "seeds")
    return config.robustness_job(d_model, seed)


def stage_robustness_job(config: Config, stage: str, seed: int) -> RobustnessJob:
    """Return the job of `tapernorm evaluate --models --stage --seed`.

    Raises:
        UserError: the config has no such stage or seed, or the stage is not scored on odd inputs.
    """
    _require_seed(seed, config.stage(stage).seeds, f"stage {stage}")
    return config.stage_robustness_job(stage, seed)


def _require(option: str, given: object, known: Collection[object], where: str) -> None:
    if given not in known:
        raise UserError(f"--{option} {given} is not among those of {where}: {', '.join(map(str, known)) or 'none'}")


def _require_seed(seed: int, known: Collection[int], where: str, key: str | None = None) -> None:
    remedy = f"; to run it, give --set '{key}=[{seed}]'" if key else ""
    if seed not in known:
        raise UserError(f"--seed {seed} is not among those of {where}: {', '.join(map(str, known))}{remedy}")
