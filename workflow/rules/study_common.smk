# What the study's rules share: its stages, where each of their runs lies, what is made of a stage.
from tapernorm.study_cells import homes, stage_job

STAGES = [stage.name for stage in RUN.study or ()]
DRAWN = [stage.name for stage in RUN.study or () if stage.figure]
HOMES = homes(RUN)
STAGE_ROWS = f"{RESULTS}/tables/study_{{stage}}.csv"
STAGE_TABLE = f"{RESULTS}/tables/table_{{stage}}"
STAGE_FIGURE = f"{FIGURES}/figure_{{stage}}"


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


def stage_files(stage):
    tables = multiext(f"{RESULTS}/tables/table_{stage}", ".csv", ".md", ".tex")
    figures = multiext(f"{FIGURES}/figure_{stage}", ".pdf", ".png", ".csv")
    return [*tables, *(figures if stage in DRAWN else [])]
