# Names of what Table S3 is made from and of what is made for it, and where the models are that it tries: those of a
# width and seed, or the arms of a stage and seed.
ODD = RUN.robustness
ODD_TEXTS = [text.name for text in ODD.texts]
ODD_SCORES = f"{RESULTS}/robustness/{{place}}/seed{{seed}}.json"
ODD_ROWS = multiext(
    f"{RESULTS}/tables/study_{{trials}}", ".csv", "_trials.csv", "_positions.csv"
)
S3_ROWS = [path.format(trials="S3") for path in ODD_ROWS]
S3_TABLES = ["table_S3", "table_S3x"]
S3_FILES = expand(
    f"{RESULTS}/tables/{{table}}.{{kind}}", table=S3_TABLES, kind=["csv", "md", "tex"]
) + multiext(f"{FIGURES}/figure_S3", ".pdf", ".png", ".csv")


ARMS_TABLE = f"{RESULTS}/tables/table_S3_{{stage}}"


def arms_files(stage):
    return multiext(ARMS_TABLE.format(stage=stage), ".csv", ".md", ".tex")


def stage_tried(trials):
    """The stage that rows of that name are of; None: of the run's own models."""
    return trials.removeprefix("S3_") if trials != "S3" else None


def odd_scores(trials):
    stage = stage_tried(trials)
    if stage is None:
        cells = [(f"d{width}", seed) for width, seed in RUN.robustness_cells()]
    else:
        cells = [
            (f"study/{name}", seed)
            for name, seed in RUN.tried_stage_cells()
            if name == stage
        ]
    return [ODD_SCORES.format(place=place, seed=seed) for place, seed in cells]


def trials_job(stage):
    return canonical_json(RUN.trials_job(stage))


def robustness_job(wildcards):
    kind, _, stage = wildcards.place.partition("/")
    seed = int(wildcards.seed)
    if stage:
        return RUN.stage_robustness_job(stage, seed)
    return RUN.robustness_job(int(kind.removeprefix("d")), seed)


def tried_models(wildcards):
    """Model -> where it is: a variant's run where it keeps all norms, else its folded form; an arm's run."""
    job, (_, _, stage) = robustness_job(wildcards), wildcards.place.partition("/")
    if stage:
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
    made = "result.json" if "/" in wildcards.place else "model.safetensors"
    return [f"{folder}/{made}" for folder in tried_models(wildcards).values()]
