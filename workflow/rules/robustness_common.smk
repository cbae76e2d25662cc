# Where the scores on odd inputs are, and the models that are tried: those of a width and seed, or the arms of a stage
# and seed.
ODD = RUN.robustness
ODD_TEXTS = [text.name for text in ODD.texts]
ODD_PLACES = [
    *dict.fromkeys(f"d{width}" for width, _ in RUN.robustness_cells()),
    *(f"study/{stage}" for stage in ODD.stages),
]
ODD_SCORES = f"{RESULTS}/robustness/{{place}}/seed{{seed}}.json"


def odd_scores(stage):
    """Scores of a stage's arms; None: of the run's own models."""
    if stage is None:
        cells = [(f"d{width}", seed) for width, seed in RUN.robustness_cells()]
    else:
        cells = [(f"study/{stage}", seed) for seed in RUN.stage(stage).seeds]
    return [ODD_SCORES.format(place=place, seed=seed) for place, seed in cells]


def stage_tried(wildcards):
    """The stage whose arms are scored; None: the run's own models are."""
    _, _, stage = wildcards.place.partition("study/")
    return stage or None


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
            if not Variant.named(variant).tapers
            else f"{RESULTS}/fold/{variant}/{place}/fused"
        )
        for variant in job.models
    }


def tried_files(wildcards):
    """What the models' jobs declare: weights, or the result of an arm, which has no weights where it diverged."""
    made = "model.safetensors" if stage_tried(wildcards) is None else "result.json"
    return [f"{folder}/{made}" for folder in tried_models(wildcards).values()]
