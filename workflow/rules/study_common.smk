# What the study's rules share: its stages, and where each of their runs lies.
from tapernorm_lab.config.study_runs import homes, stage_job

STAGES = [stage.name for stage in RUN.study or ()]
HOMES = homes(RUN)
ODDITIES_ROWS = f"{RESULTS}/{catalogue.SOURCES['oddities'].files[0]}"


def arm_job(wildcards):
    stage = RUN.stage(wildcards.stage)
    return RUN.arm_job(stage, stage.arm(wildcards.arm), int(wildcards.seed))


def arm_load(wildcards):
    return Load.of_pretraining(arm_job(wildcards).pretrain, RUN.hardware)


def stage_results(stage):
    return [
        f"{RESULTS}/{folder}/result.json"
        for (name, _, _), folder in HOMES.items()
        if name == stage
    ]
