# Functions of the rules: the job of a cell, its cost and its inputs.
from tapernorm_lab.config.gpt2 import METHODS, TEXTS
from tapernorm_lab.config.job_cost import Load, limit_min, memory_mb
from tapernorm_lab.config.run_cost import is_probed, linear_job
from tapernorm_lab.config.study_runs import homes, stage_job
from tapernorm_lab.config.variants import Variant
from tapernorm_lab.report import catalogue

GPUS = 0 if RUN.hardware.device == "cpu" else 1  # GPUs of a job on the device
TRAINING_GPUS = GPUS * RUN.hardware.devices_per_job  # GPUs of a pre-training
LARGEST_JOB = GPUS * RUN.most_devices
# Snakemake silently lowers a request above the limit to the limit.
if "gpu" in workflow.global_resources:
    GPU_LIMIT = workflow.global_resources["gpu"].value
    if GPU_LIMIT < LARGEST_JOB:
        raise WorkflowError(
            f"devices_per_job is {LARGEST_JOB} and this call's limit of the resource gpu is {GPU_LIMIT}: "
            "raise the limit (--resources gpu=N, or the profile), or lower devices_per_job"
        )

# The hardware of a job that scores or times models, as command-line options.
ON_DEVICE = {"device": RUN.hardware.device, "gpu": GPUS, "jobs_per_gpu": RUN.hardware.jobs_per_gpu}
DEVICE_OPTIONS = "--device {resources.device} --jobs-per-gpu {resources.jobs_per_gpu}"


# The choice of a kernel comes before the first training, and a newer one is no reason to train again.
KERNELS = [ancient(f"{RESULTS}/kernels.json")] if is_probed(RUN) else []
KERNELS_OPTION = f" --kernels {RESULTS}/kernels.json" if KERNELS else ""


def training(load, hardware=lambda wildcards: RUN.hardware, gpu=TRAINING_GPUS):
    """Resources of a training whose cost is `load`, a function of the wildcards."""
    return {
        "hardware": lambda wildcards: canonical_json(hardware(wildcards)),
        "gpu": gpu,
        "mem_mb": lambda wildcards: memory_mb(load(wildcards), hardware(wildcards)),
        "runtime": lambda wildcards, attempt: limit_min(load(wildcards), hardware(wildcards), attempt),
    }


def one_of(names):
    """A wildcard's constraint: one of these names, or nothing where there is none."""
    return "|".join(names) or "(?!)"


def folders_of(input):
    """--NAME DIR of each named input, where its files lie."""
    return [
        word
        for name, files in input.items()
        for word in (f"--{name}", str(Path(files if isinstance(files, str) else files[0]).parent))
    ]


def below(folder, *names):
    """Files of a folder of the results."""
    return [f"{RESULTS}/{folder}/{name}" for name in names]


def pretrain_job(wildcards):
    return RUN.pretrain_job(wildcards.variant, int(wildcards.width), int(wildcards.seed))


def arm_job(wildcards):
    stage = RUN.stage(wildcards.stage)
    return RUN.arm_job(stage, stage.arm(wildcards.arm), int(wildcards.seed))


# Texts and tokens: folder below the results -> its job and, for tokens, their inputs.
def corpus_files(place):
    return below(place, "train.jsonl", "valid.jsonl", "manifest.json")


def blocks_of(text):
    """The files of a text's blocks; one that is only scored has no training split."""
    splits = ["train.bin", "valid.bin"] if text in TEXTS else ["valid.bin"]
    return below(f"gpt2/blocks/{text}", *splits, "manifest.json")


def gpt2_texts(*kinds):
    """Evaluation corpora of these kinds."""
    return [c.name for c in RUN.gpt2.corpora if c.kind in kinds] if RUN.gpt2 else []


def made_by_own_tokenizer(corpus):
    return {
        "corpus": f"{RESULTS}/{corpus}/manifest.json",
        "tokenizer": f"{RESULTS}/data/tokenizer/manifest.json",
    }


def made_by_gpt2_tokenizer(*corpora):
    texts = {"corpus": corpus_files(corpus) for corpus in corpora}
    return {**texts, "tokenizer": f"{RESULTS}/gpt2/tokenizer/manifest.json"}


DATA_TOKENS = below("data/tokens", "train.bin", "valid.bin", "manifest.json")
CORPORA = {"data/corpus": RUN.corpus_job()}
TOKENIZERS = {"data": (RUN.tokenizer_job(), {"corpus": corpus_files("data/corpus")})}
TOKENS = {"data/tokens": (RUN.tokens_job(), made_by_own_tokenizer("data/corpus"))}
SCORED_TOKENS = {}  # tokens that are only scored: they have a validation split alone
if RUN.gpt2:
    for text in ["base"] * bool(RUN.gpt2.base_text) + ["train"] * bool(RUN.gpt2.text) + gpt2_texts("text"):
        CORPORA[f"gpt2/corpora/{text}"] = RUN.gpt2_corpus_job(text)
        made = TOKENS if text in TEXTS else SCORED_TOKENS
        made[f"gpt2/blocks/{text}"] = (RUN.blocks_job(text), made_by_gpt2_tokenizer(f"gpt2/corpora/{text}"))
    for text in gpt2_texts("rows"):  # rows that are already tokenized
        SCORED_TOKENS[f"gpt2/blocks/{text}"] = (RUN.hub_rows_job(text), made_by_gpt2_tokenizer())
    if RUN.gpt2.tokenizer:
        TOKENIZERS["gpt2"] = (RUN.gpt2_tokenizer_job(), {"corpus": corpus_files("gpt2/corpora/base")})
    else:
        TOKENIZERS["gpt2"] = (RUN.bpe_job(), {})
for text in RUN.robustness.texts if RUN.robustness else ():
    place = f"robustness/texts/{text.name}"
    CORPORA[f"{place}/corpus"] = RUN.robustness.corpus_job(text.name)
    job = RUN.robustness.blocks_job(RUN.model.context)
    SCORED_TOKENS[f"{place}/rows"] = (job, made_by_own_tokenizer(f"{place}/corpus"))


def own_files(wildcards):
    """The user's own files that a corpus is made of."""
    return [path for data in CORPORA[wildcards.corpus].data for path in OWN_FILES[data]]


# Models: the folder of each run of the study and of the GPT-2 track.
HOMES = homes(RUN)
SIZES = {size.name: size for size in RUN.gpt2.sizes} if RUN.gpt2 else {}
GPT2_CORPORA = {  # evaluation corpus -> the blocks that hold its rows
    corpus.name: "train" if corpus.kind == "held_out" else corpus.name
    for corpus in (RUN.gpt2.corpora if RUN.gpt2 else ())
}


def timed_run(stage):
    """The tapered model that a benchmark takes: the run's widest, or one of the width of a stage, if one is named."""
    cell, needed = RUN.benched, "internal_aux among the variants of some width"
    if stage:
        width = RUN.stage(stage).d_model
        cell = next((c for c in RUN.pretrain_cells() if c[0].tapers and c[1] == width), None)
        needed = f"a tapered model of width {width}"
    if cell is None:
        raise WorkflowError(f"the decoding benchmark needs {needed}")
    variant, width, seed = cell
    return below(f"pretrain/{variant}/d{width}/seed{seed}", "model.safetensors", "result.json")


def finetune_load(wildcards):
    job = RUN.finetune_job(wildcards.method, wildcards.size, int(wildcards.seed))
    hardware = RUN.finetune_hardware(wildcards.size)
    return Load.of_finetune(job, RUN.base_job(wildcards.size), own_vocabulary(), hardware)


def own_vocabulary():
    """Pieces of the tokenizer that is trained here; None where GPT-2's own is taken."""
    return RUN.gpt2.tokenizer.vocab_size if RUN.gpt2.tokenizer else None


def scored_as_it_is(wildcards):
    """The weights of an original or a published model, which is scored without a fine-tune of ours."""
    method, published, origin = wildcards.method.rpartition("published_")
    place = f"published/{origin}" if published else "base"
    return f"{RESULTS}/gpt2/{place}/{wildcards.size}/model.safetensors"


# Odd inputs: (place, seed) -> the job that scores the models of a width or the arms of a stage, and their folders.
ODD_INPUTS = {}
for width, seed in RUN.robustness_cells():
    job = RUN.robustness_job(width, seed)
    ODD_INPUTS[f"d{width}", seed] = job, {
        variant: (
            f"pretrain/{variant}/d{width}/seed{seed}"
            if not Variant.named(variant).tapers
            else f"fold/{variant}/d{width}/seed{seed}/fused"
        )
        for variant in job.models
    }
for stage in RUN.robustness.stages if RUN.robustness else ():
    for seed in RUN.stage(stage).seeds:
        job = RUN.stage_robustness_job(stage, seed)
        ODD_INPUTS[f"study/{stage}", seed] = job, {arm: HOMES[stage, arm, seed] for arm in job.models}


def odd_inputs(wildcards):
    return ODD_INPUTS[wildcards.place, int(wildcards.seed)]


def odd_input_models(wildcards):
    """What the models' jobs declare: weights, or the result of an arm, which has no weights where it diverged."""
    file = "result.json" if wildcards.place.startswith("study/") else "model.safetensors"
    return [f"{RESULTS}/{folder}/{file}" for folder in odd_inputs(wildcards)[1].values()]


def odd_input_scores(stage):
    """Scores of a stage's arms; None: of the run's own models."""
    return [
        f"{RESULTS}/robustness/{place}/seed{seed}.json"
        for place, seed in ODD_INPUTS
        if place == f"study/{stage}" or (stage is None and not place.startswith("study/"))
    ]


# Rows, tables and figures.
PRODUCTS = catalogue.products_of(RUN)
TABLES = [name for name in PRODUCTS if name.startswith("table")]
FIGURES_OF_RUN = [name for name in PRODUCTS if name.startswith("figure")]
BENCHED = ["decode", "last_token"] if RUN.benched else []


def product_job(wildcards):
    return canonical_json(PRODUCTS[wildcards.name].cut(RUN))


def product_rows(wildcards):
    return [f"{RESULTS}/{file}" for file in PRODUCTS[wildcards.name].needs]


def category_of(paper):
    """The part of the report that shows a table or figure: `paper` for the paper's own, or that of the study."""
    return lambda wildcards: "Study" if "_S" in wildcards.name else paper


def files_of_source(name):
    return [f"{RESULTS}/{file}" for file in catalogue.SOURCES[name].files]


def stage_results(stage):
    return [f"{RESULTS}/{folder}/result.json" for (name, _, _), folder in HOMES.items() if name == stage]


def scores_of(model):
    """Scores of a GPT-2 on every corpus."""
    name = model.size if model.seed is None else f"{model.size}/seed{model.seed}"
    return f"{RESULTS}/evaluate/{model.method}/{name}.json"


# Results of all the run's own models and of all folds; scores of every GPT-2, and results of the fine-tunes.
CELLS = RUN.pretrain_cells()
TRAINED = [f"{RESULTS}/pretrain/{v}/d{d}/seed{s}/result.json" for v, d, s in CELLS]
TRAINED += [f"{RESULTS}/fold/{v}/d{d}/seed{s}/result.json" for v, d, s in CELLS if v.tapers]
GPT2_SCORES = [scores_of(model) for model in (RUN.models_under_test() if RUN.gpt2 else ())]
GPT2_SCORES += [f"{RESULTS}/finetune/{method}/{size}/seed{s}/result.json" for method, size, s in RUN.finetune_cells()]

# NAME -> the inputs of its rows, their files, and the arguments of the command.
ROWS = {"training": (TRAINED, files_of_source("training"), [*TRAINED, "--run", RUN.run])}
if RUN.gpt2:
    ROWS["gpt2"] = (GPT2_SCORES, files_of_source("gpt2"), [*GPT2_SCORES, "--run", RUN.run])
for stage in RUN.study or ():
    ROWS[f"study_{stage.name}"] = (
        stage_results(stage.name),
        [f"{RESULTS}/{file}" for file in catalogue.SOURCES["stage"].at(stage.name)],
        ["--job", canonical_json(stage_job(RUN, stage.name)), "--results", RESULTS],
    )
for stage in (None, *RUN.robustness.stages) if RUN.robustness else ():
    job, scores = RUN.odd_inputs_report_job(stage), odd_input_scores(stage)
    files = [f"{RESULTS}/{file}" for file in catalogue.odd_inputs_files(stage)]
    ROWS[f"study_{job.name}"] = (scores, files, [*scores, "--job", canonical_json(job)])
