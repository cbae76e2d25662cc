# What the study's rules share: its stages, where each of their runs lies, what is made of a stage.
from tapernorm_lab.config.study_runs import has_rivals, homes, stage_job

STAGES = [stage.name for stage in RUN.study or ()]
DRAWN = [stage.name for stage in RUN.study or () if stage.figure]
HOMES = homes(RUN)
STAGE_ROWS = f"{RESULTS}/{sources.STAGE_ROWS}"
STAGE_TABLE = f"{RESULTS}/tables/table_{{stage}}"
STAGE_FIGURE = f"{FIGURES}/figure_{{stage}}"

# Stages with rivals, whose arms are timed and tried on odd inputs as well.
WITH_RIVALS = [stage.name for stage in RUN.study or () if has_rivals(stage)]
ODDITIES_ROWS = f"{RESULTS}/{sources.ODDITIES_ROWS}"
RIVAL_BENCH = f"{RESULTS}/{sources.RIVALS_BENCH}"
ODDITIES_TABLE = f"{RESULTS}/tables/table_{{stage}}_oddities"


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


def oddities_files(stage):
    return multiext(ODDITIES_TABLE.format(stage=stage), ".csv", ".md", ".tex")
