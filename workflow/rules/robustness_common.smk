# Names of what Table S3 is made from and of what is made for it, and where the models are that it tries: those of a
# width and seed, or the arms of a stage and seed.
ODD = RUN.robustness
ODD_TEXTS = [text.name for text in ODD.texts]
ODD_PLACES = [
    *dict.fromkeys(f"d{width}" for width, _ in RUN.robustness_cells()),
    *(f"study/{stage}" for stage in ODD.stages),
]
STAGE_OF = {
    RUN.trials_job(stage).name: stage for stage in [None, *ODD.stages]
}  # of rows
ODD_SCORES = f"{RESULTS}/robustness/{{place}}/seed{{seed}}.json"
ODD_ROWS = [f"{RESULTS}/{path}" for path in sources.TRIALS_ROWS]
S3_TABLES = ["table_S3", "table_S3x"]
S3_FILES = expand(
    f"{RESULTS}/tables/{{table}}.{{kind}}", table=S3_TABLES, kind=["csv", "md", "tex"]
) + multiext(f"{FIGURES}/figure_S3", ".pdf", ".png", ".csv")
ARMS_TABLE = f"{RESULTS}/tables/table_S3_{{stage}}"


def arms_files(stage):
    return multiext(ARMS_TABLE.format(stage=stage), ".csv", ".md", ".tex")


def trials_rows(stage):
    """Rows of a stage's arms; None: of the run's own models."""
    name = RUN.trials_job(stage).name
    return [path.format(trials=name) for path in ODD_ROWS]


def odd_scores(stage):
    if stage is None:
        cells = [(f"d{width}", seed) for width, seed in RUN.robustness_cells()]
    else:
        cells = [(f"study/{stage}", seed) for seed in RUN.stage(stage).seeds]
    return [ODD_SCORES.format(place=place, seed=seed) for place, seed in cells]


def stage_tried(wildcards):
    """The stage whose arms are scored; None: the run's own models are."""
    _, _, stage = wildcards.place.partition("study/")
    return stage or None


def trials_job(stage):
    return canonical_json(RUN.trials_job(stage))


def robustness_job(wildcards):
    stage, seed = stage_tried(wildcards), int(wildcards.seed)
    if stage is None:
        return RUN.robustness_job(int(wildcards.place.removeprefix("d")), seed)
    return RUN.stage_robustness_job(stage, seed)


def tried_models(wildcards):
    """Model -> where it is: an arm's run (HOMES, of study_common.smk), a variant's, or its folded form if tapered."""
    job, stage = robustness_job(wildcards), stage_tried(wildcards)
    if stage is not None:
        return {arm: f"{RESULTS}/{HOMES[stage, arm, job.seed]}" for arm in job.models}
    place = f"{wildcards.place}/seed{wildcards.seed}"
    return {
        variant: (
            f"{RESULTS}/pretrain/{variant}/{place}"
            if variant == "baseline"
            else f"{RESULTS}/fold/{variant}/{place}/fused"
        )
        for variant in job.models
    }


def tried_files(wildcards):
    """What the models' jobs declare: weights, or the result of an arm, which has no weights where it diverged."""
    made = "model.safetensors" if stage_tried(wildcards) is None else "result.json"
    return [f"{folder}/{made}" for folder in tried_models(wildcards).values()]
