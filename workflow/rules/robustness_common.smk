# Names of what Table S3 is made from and of what is made for it, and where the models of a width and seed are.
ODD = RUN.robustness
ODD_TEXTS = [text.name for text in ODD.texts]
S3_SCORES = [
    f"{RESULTS}/robustness/d{width}/seed{seed}.json"
    for width, seed in RUN.robustness_cells()
]
S3_ROWS = multiext(
    f"{RESULTS}/tables/study_S3", ".csv", "_trials.csv", "_positions.csv"
)
S3_TABLES = ["table_S3", "table_S3x"]
S3_FILES = expand(
    f"{RESULTS}/tables/{{table}}.{{kind}}", table=S3_TABLES, kind=["csv", "md", "tex"]
) + multiext(f"{FIGURES}/figure_S3", ".pdf", ".png", ".csv")


def robustness_job(wildcards):
    return RUN.robustness_job(int(wildcards.width), int(wildcards.seed))


def finished_models(wildcards):
    """Variant -> where its model is: its run where it keeps all norms, else its folded form."""
    place = f"d{wildcards.width}/seed{wildcards.seed}"
    return {
        variant: (
            f"{RESULTS}/pretrain/{variant}/{place}"
            if variant == "baseline"
            else f"{RESULTS}/fold/{variant}/{place}/fused"
        )
        for variant in robustness_job(wildcards).models
    }
