# What rows are gathered from, and the tables and figures that are made from them.
from tapernorm_lab.config.study_runs import stage_job

BENCHED = ["decode", "last_token"] if RUN.benched else []
PRODUCTS = catalogue.products_of(RUN)
TABLES, FIGURES_OF_RUN = (
    [name for name in PRODUCTS if name.startswith(kind)] for kind in ("table", "figure")
)


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
    return [f"{RESULTS}/{file}" for file in catalogue.SOURCES[name].files]


# NAME -> what its rows are gathered from, the files that they are, and the words of the verb.
ROWS = {}
for kind, results in {
    "training": trained_results(),
    "gpt2": gpt2_results() if RUN.gpt2 else [],
}.items():
    if results:
        ROWS[kind] = (results, files_of_source(kind), [*results, "--run", RUN.run])
for stage in RUN.study or ():
    ROWS[f"study_{stage.name}"] = (
        stage_results(stage.name),
        [f"{RESULTS}/{file}" for file in catalogue.SOURCES["stage"].at(stage.name)],
        ["--job", canonical_json(stage_job(RUN, stage.name)), "--results", RESULTS],
    )
if RUN.robustness:
    for stage in (None, *RUN.robustness.stages):
        job = RUN.trials_job(stage)
        ROWS[f"study_{job.name}"] = (
            odd_scores(stage),
            [f"{RESULTS}/{file}" for file in catalogue.odd_inputs_files(stage)],
            [*odd_scores(stage), "--job", canonical_json(job)],
        )
