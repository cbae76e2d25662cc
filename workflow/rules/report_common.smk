# What rows are gathered from, and the tables and figures that are made from them.
from tapernorm_lab.config.study_runs import stage_job

BENCHED = ["decode", "last_token"] if RUN.benched else []
TABLES, FIGURES_OF_RUN = products.tables_of(RUN), products.figures_of(RUN)
PRODUCTS = {**TABLES, **FIGURES_OF_RUN}


def product_job(wildcards):
    return canonical_json(PRODUCTS[wildcards.name].cut(RUN))


def product_rows(wildcards):
    return [f"{RESULTS}/{file}" for file in PRODUCTS[wildcards.name].needs]


def category_of(paper):
    """The part of the report that shows a table or figure: `paper` for the paper's own, or that of the study."""
    return lambda wildcards: "Study" if "_S" in wildcards.name else paper


def trained_results():
    """Of every model of the run's own, and of every fold of a tapered one."""
    cells = RUN.pretrain_cells()
    return [f"{RESULTS}/pretrain/{v}/d{d}/seed{s}/result.json" for v, d, s in cells] + [
        f"{RESULTS}/fold/{v}/d{d}/seed{s}/result.json"
        for v, d, s in cells
        if v != "baseline"
    ]


def gpt2_results():
    """Scores of every model of the GPT-2 track, and the results of our fine-tunes."""
    return [evaluation_of(model) for model in RUN.models_under_test()] + [
        f"{RESULTS}/finetune/{method}/{size}/seed{seed}/result.json"
        for method, size, seed in RUN.finetune_cells()
    ]


def files_of_source(name):
    return [f"{RESULTS}/{file}" for file in sources.SOURCES[name].files]


# NAME -> what its rows are gathered from, the files that they are, what names their run, and how these are said.
OF_RUN = "{input:q} --run {params.told:q}"
ROWS = {"training": (trained_results(), files_of_source("training"), RUN.run, OF_RUN)}
if RUN.gpt2:
    ROWS["gpt2"] = (gpt2_results(), files_of_source("gpt2"), RUN.run, OF_RUN)
for stage in RUN.study or ():
    file = f"{RESULTS}/{sources.STAGE_ROWS.format(stage=stage.name)}"
    told = canonical_json(stage_job(RUN, stage.name))
    words = f"--job {{params.told:q}} --results {RESULTS}"
    ROWS[f"study_{stage.name}"] = (stage_results(stage.name), [file], told, words)
if RUN.robustness:
    for stage in (None, *RUN.robustness.stages):
        job = RUN.trials_job(stage)
        files = [
            f"{RESULTS}/{path.format(trials=job.name)}" for path in sources.TRIALS_ROWS
        ]
        words = "{input:q} --job {params.told:q}"
        ROWS[f"study_{job.name}"] = (
            odd_scores(stage),
            files,
            canonical_json(job),
            words,
        )
