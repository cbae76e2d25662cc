# What the study's rules share: its stages, where each of their runs lies, what is made of a stage.
from tapernorm.study_cells import homes, stage_job

STAGES = [stage.name for stage in RUN.study or ()]
DRAWN = [stage.name for stage in RUN.study or () if stage.figure]
HOMES = homes(RUN)
STAGE_ROWS = f"{RESULTS}/tables/study_{{stage}}.csv"
STAGE_TABLE = f"{RESULTS}/tables/table_{{stage}}"
STAGE_FIGURE = f"{FIGURES}/figure_{{stage}}"

# Stages with rivals, whose arms are timed and tried on odd inputs as well.
WITH_RIVALS = [
    stage.name
    for stage in RUN.study or ()
    if not stage.search
    and any(arm.treatment and arm.treatment.norm for arm in stage.arms)
]
ODDITIES_ROWS = f"{RESULTS}/tables/study_{{stage}}_oddities.csv"
RIVAL_BENCH = f"{RESULTS}/bench/rivals_{{stage}}.json"
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


def oddities_sources(stage):
    """Rows and bench: asked for as well, since Snakemake takes a table that came with a clone for made."""
    return [path.format(stage=stage) for path in (ODDITIES_ROWS, RIVAL_BENCH)]


def are_there(*paths):
    return all(Path(path).exists() for path in paths)


def committed_files():
    """Tables and figures that can be made from the rows that are there."""
    of_stages = [
        stage_files(stage)
        for stage in STAGES
        if are_there(STAGE_ROWS.format(stage=stage))
    ]
    of_rivals = [
        oddities_files(stage)
        for stage in WITH_RIVALS
        if are_there(*oddities_sources(stage))
    ]
    of_odd_inputs = odd_files() if RUN.robustness else []
    return [*of_stages, *of_rivals, *of_odd_inputs, paper_files()]


def paper_files():
    """Those of the paper's tables and figures that are made from rows and benchmarks, where these are there."""
    names = {
        (f"{RESULTS}/rows/results.csv", f"{RESULTS}/rows/curves.csv"): (
            ["table1"],
            ["figure1a", "figure1b", "figure2"],
        ),
        (f"{RESULTS}/bench/decode.json",): (["table2", "table2x"], ["figure_decode"]),
        (f"{RESULTS}/bench/last_token.json",): (["table2v1"], []),
    }
    found = []
    for sources, (tables, figures) in names.items():
        if are_there(*sources):
            found += expand(
                f"{RESULTS}/tables/{{name}}.{{kind}}",
                name=tables,
                kind=["csv", "md", "tex"],
            )
            found += expand(
                f"{FIGURES}/{{name}}.{{kind}}", name=figures, kind=["pdf", "png", "csv"]
            )
    return found
