# What rules ask for: the job of a cell and what it costs, its GPU, the files that a table or figure is made from.
from tapernorm.estimates import Load, limit_min, memory_mb

GPUS = 0 if RUN.hardware.device == "cpu" else 1  # of a job on the device
TRAINING_GPUS = GPUS * RUN.hardware.devices_per_job  # of a pre-training
LARGEST_JOB = GPUS * RUN.most_devices
# Snakemake cuts a request above the limit down to it, in silence.
if "gpu" in workflow.global_resources:
    GPU_LIMIT = workflow.global_resources["gpu"].value
    if GPU_LIMIT < LARGEST_JOB:
        raise WorkflowError(
            f"devices_per_job is {LARGEST_JOB} and this call's limit of the resource gpu is {GPU_LIMIT}: "
            "raise the limit (--resources gpu=N, or the profile), or lower devices_per_job"
        )


def pretrain_job(wildcards):
    return RUN.pretrain_job(
        wildcards.variant, int(wildcards.width), int(wildcards.seed)
    )


def pretrain_load(wildcards):
    return Load.of_pretraining(pretrain_job(wildcards), RUN.hardware)


def benched_run(wildcards):
    if RUN.benched is None:
        raise WorkflowError(
            "the decoding benchmark needs internal_aux among the variants of some width"
        )
    variant, width, seed = RUN.benched
    return multiext(
        f"{RESULTS}/pretrain/{variant}/d{width}/seed{seed}/",
        "model.safetensors",
        "result.json",
    )


def source_of(wildcards):
    """The option and file that a table or figure is made from: training rows, or the samples of a benchmark."""
    name = wildcards.get("table") or wildcards.get("figure")
    if name == "table2v1":
        return "--bench", f"{RESULTS}/bench/last_token.json"
    if name in ("table2", "table2x", "figure_decode"):
        return "--bench", f"{RESULTS}/bench/decode.json"
    if name in ("table3", "table3x", "figure_finetune"):
        return "--rows", f"{RESULTS}/gpt2_rows"
    return "--rows", f"{RESULTS}/rows"


def source_files(wildcards):
    option, path = source_of(wildcards)
    if option == "--bench":
        return path
    names = {
        f"{RESULTS}/rows": ["results", "curves"],
        f"{RESULTS}/gpt2_rows": ["scores", "curves", "removals"],
    }
    return [f"{path}/{name}.csv" for name in names[path]]
