# What rules ask for: the job of a cell and what it costs, its GPU, what texts and tokens are made from.
from tapernorm_lab.config.job_cost import Load, limit_min, memory_mb
from tapernorm_lab.report import catalogue

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


def timed_run(stage):
    """The tapered model that a benchmark takes: the run's widest, or one of the width of a stage, if one is named."""
    if not stage and RUN.benched is None:
        raise WorkflowError(
            "the decoding benchmark needs internal_aux among the variants of some width"
        )
    width = RUN.stage(stage).d_model if stage else None
    cells = [
        cell
        for cell in RUN.pretrain_cells()
        if cell[0] != "baseline" and cell[1] == width
    ]
    if stage and not cells:
        raise WorkflowError(
            f"the decoding benchmark of stage {stage} needs a tapered model of width {width}"
        )
    variant, width, seed = cells[0] if stage else RUN.benched
    return multiext(
        f"{RESULTS}/pretrain/{variant}/d{width}/seed{seed}/",
        "model.safetensors",
        "result.json",
    )


def own_files(job):
    """The user's own files that a corpus is made of."""
    return [path for data in job.data for path in OWN_FILES[data]]


def one_of(names):
    """A wildcard's constraint: one of these names, or nothing where there is none."""
    return "|".join(names) or "(?!)"


def gpt2_texts(*kinds):
    """Evaluation corpora of these kinds."""
    return [c.name for c in RUN.gpt2.corpora if c.kind in kinds] if RUN.gpt2 else []


def folders_of(input):
    """--NAME DIR of each named input, where its files lie."""
    found = {
        name: [files] if isinstance(files, str) else files
        for name, files in input.items()
    }
    return [
        word
        for name, files in found.items()
        for word in (f"--{name}", str(Path(files[0]).parent))
    ]


def corpus_files(place):
    return [
        f"{RESULTS}/{place}/{file}"
        for file in ("train.jsonl", "valid.jsonl", "manifest.json")
    ]


def tokenizer_inputs(wildcards):
    """The corpus that a tokenizer is trained on; a published one has none."""
    if wildcards.home == "data":
        return {"corpus": corpus_files("data/corpus")}
    return {"corpus": corpus_files("gpt2/corpora/base")} if RUN.gpt2.tokenizer else {}


def tokens_inputs(wildcards):
    """The corpus and the tokenizer that tokens are made from; rows that come tokenized have no corpus."""
    place = Path(wildcards.tokens)
    if place.parts[0] != "gpt2":
        corpus = (
            "data/corpus" if place.parts[0] == "data" else place.with_name("corpus")
        )
        manifest, tokenizer = (
            f"{RESULTS}/{corpus}/manifest.json",
            f"{RESULTS}/data/tokenizer/manifest.json",
        )
        return {"corpus": manifest, "tokenizer": tokenizer}
    tokenizer = {"tokenizer": f"{RESULTS}/gpt2/tokenizer/manifest.json"}
    return (
        tokenizer
        if place.name in gpt2_texts("rows")
        else {"corpus": corpus_files(f"gpt2/corpora/{place.name}"), **tokenizer}
    )


DATA_TOKENS = [
    f"{RESULTS}/data/tokens/{file}"
    for file in ("train.bin", "valid.bin", "manifest.json")
]
# Folder below the results -> the job that makes it.
CORPORA = {"data/corpus": RUN.corpus_job()}
TOKENIZERS = {"data": RUN.tokenizer_job()}
TOKENS = {"data/tokens": RUN.tokens_job()}
SCORED_TOKENS = {}  # whose validation split alone is there to be scored
if RUN.gpt2:
    texts = [
        text
        for text, data in (("base", RUN.gpt2.base_text), ("train", RUN.gpt2.text))
        if data
    ]
    CORPORA |= {
        f"gpt2/corpora/{text}": RUN.gpt2_corpus_job(text)
        for text in [*texts, *gpt2_texts("text")]
    }
    TOKENIZERS["gpt2"] = (
        RUN.gpt2_tokenizer_job() if RUN.gpt2.tokenizer else RUN.bpe_job()
    )
    TOKENS |= {f"gpt2/blocks/{text}": RUN.blocks_job(text) for text in texts}
    SCORED_TOKENS |= {
        f"gpt2/blocks/{text}": RUN.blocks_job(text) for text in gpt2_texts("text")
    }
    SCORED_TOKENS |= {
        f"gpt2/blocks/{text}": RUN.hub_rows_job(text) for text in gpt2_texts("rows")
    }
if RUN.robustness:
    for text in RUN.robustness.texts:
        CORPORA[f"robustness/texts/{text.name}/corpus"] = RUN.robustness.corpus_job(
            text.name
        )
        SCORED_TOKENS[f"robustness/texts/{text.name}/rows"] = RUN.robustness.blocks_job(
            RUN.model.context
        )
