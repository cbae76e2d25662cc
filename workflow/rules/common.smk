# What rules ask for: the job of a cell and what it costs, its GPU, the files that a table or figure is made from.
from tapernorm_lab.config.job_cost import Load, limit_min, memory_mb
from tapernorm_lab.report import sources

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


def source_named(wildcards):
    """What a table or figure is made from: training rows, or the samples of a benchmark."""
    name = wildcards.get("table") or wildcards.get("figure")
    return sources.SOURCES[{**sources.TABLES, **sources.FIGURES}[name]]


def source_of(wildcards):
    """Its option and place on the command line."""
    source = source_named(wildcards)
    return f"--{source.option}", f"{RESULTS}/{source.place}"


def source_files(wildcards):
    return [f"{RESULTS}/{file}" for file in source_named(wildcards).files]


def own_files(job):
    """The user's own files that a corpus is made of."""
    return [path for data in job.data for path in OWN_FILES[data]]
