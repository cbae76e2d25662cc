"""The folder of each run of a study, and the job that reports a stage. Equal jobs share one run, trained once."""

from tapernorm.util.hashing import canonical_json, digest

from .jobs import PretrainJob
from .run import Config
from .sections import Seed, Strict
from .study import ArmJob, Name, Stage, StageName


class ArmRun(Strict):
    """One run that a stage reports."""

    arm: Name
    seed: Seed
    folder: str  # relative to the results of the study's run
    config_hash: str  # hash of the job that its result must come from


class StageJob(Strict):
    """The settings that define the rows and tables of a stage, besides the results of its runs."""

    run: str
    caption: str
    stage: Stage
    runs: tuple[ArmRun, ...]


def run_folder(stage: str, arm: str, seed: int) -> str:
    """Return the folder of a run that shares its job with no earlier run, below the results of the study's run."""
    return f"study/{stage}/{arm}/seed{seed}"


def stage_job(config: Config, name: str) -> StageJob:
    """Return the job that reports a stage.

    Raises:
        UserError: the config has no such stage.
    """
    stage, lies_in, pretrained = config.stage(name), homes(config), set(_pretrained(config).values())
    runs = []
    for arm in stage.arms:
        for seed in stage.seeds:
            job = config.arm_job(stage, arm, seed)
            folder = lies_in[name, arm.name, seed]
            own: ArmJob | PretrainJob = job.pretrain if folder in pretrained else job
            runs.append(ArmRun(arm=arm.name, seed=seed, folder=folder, config_hash=digest(canonical_json(own))))
    return StageJob(run=config.run, caption=config.caption, stage=stage, runs=tuple(runs))


def homes(config: Config) -> dict[tuple[StageName, Name, Seed], str]:
    """Return a mapping from (stage, arm, seed) to the folder of the pre-training run or first arm with the same job."""
    taken, found = _pretrained(config), {}
    for stage, arm, seed in config.study_cells():
        mine = run_folder(stage.name, arm.name, seed)
        identity = canonical_json(config.arm_job(stage, arm, seed))
        found[stage.name, arm.name, seed] = taken.setdefault(identity, mine)
    return found


def _pretrained(config: Config) -> dict[str, str]:
    """Return a mapping from each pre-training's job, written as an arm's job, to the folder of that run."""
    return {
        canonical_json(ArmJob(pretrain=config.pretrain_job(v, d, s), treatment=None)): f"pretrain/{v}/d{d}/seed{s}"
        for v, d, s in config.pretrain_cells()
    }


def replaces_norms(stage: Stage) -> bool:
    """Whether a reporting stage has arms that replace norms; they are then also timed and scored on odd inputs."""
    return not stage.search and any(arm.treatment is not None and arm.treatment.norm is not None for arm in stage.arms)


def trained_arms(config: Config) -> list[tuple[Stage, str, int]]:
    """List every (stage, arm, seed) whose run lies in its own folder, and is therefore trained for it."""
    lies_in = homes(config)
    cells = [(stage, arm.name, seed) for stage, arm, seed in config.study_cells()]
    return [
        (stage, arm, seed)
        for stage, arm, seed in cells
        if lies_in[stage.name, arm, seed] == run_folder(stage.name, arm, seed)
    ]
