# Names of the GPT-2 track, and what its rules ask for.
from tapernorm_lab.config.gpt2 import METHODS, TEXTS

GPT2 = f"{RESULTS}/gpt2"
BLOCKS = f"{GPT2}/blocks/{{text}}"
GPT2_TOKENIZER = f"{GPT2}/tokenizer/manifest.json"
FINETUNED = f"{RESULTS}/finetune/{{method}}/{{size}}/seed{{seed}}"
FINETUNE_FOLD = f"{RESULTS}/finetune_fold/{{method}}/{{size}}/seed{{seed}}"
SIZES = {size.name: size for size in RUN.gpt2.sizes}
SCORED = {  # evaluation corpus -> the blocks that hold its rows
    corpus.name: "train" if corpus.kind == "held_out" else corpus.name
    for corpus in RUN.gpt2.corpora
}


def blocks_of(text):
    """The files of a text's blocks; one that is only scored has no training split."""
    splits = ["train", "valid"] if text in TEXTS else ["valid"]
    return [
        f"{GPT2}/blocks/{text}/{name}"
        for name in [f"{split}.bin" for split in splits] + ["manifest.json"]
    ]


def folded_form(wildcards):
    """The fused export of a fine-tune, where its norms can be folded."""
    if wildcards.method == "vanilla":
        return []
    folder = FINETUNE_FOLD.format(**wildcards)
    return multiext(f"{folder}/fused/", "config.json", "model.safetensors")


def model_as_it_is(wildcards):
    """Where an original or a published model is, which is scored without a fine-tune of ours."""
    if wildcards.method == "original":
        return f"{GPT2}/base/{wildcards.size}"
    return f"{GPT2}/published/{wildcards.method.removeprefix('published_')}/{wildcards.size}"


def evaluation_of(model):
    """Where the scores of a model under test are."""
    name = model.size if model.seed is None else f"{model.size}/seed{model.seed}"
    return f"{RESULTS}/evaluate/{model.method}/{name}.json"


def base_load(wildcards):
    return Load.of_base(RUN.base_job(wildcards.size), own_vocabulary(), RUN.hardware)


def finetune_load(wildcards):
    job = RUN.finetune_job(wildcards.method, wildcards.size, int(wildcards.seed))
    base = RUN.base_job(wildcards.size)
    hardware = RUN.finetune_hardware(wildcards.size)
    return Load.of_finetune(job, base, own_vocabulary(), hardware)


def own_vocabulary():
    """Pieces of the tokenizer that is trained here; None where GPT-2's own is taken."""
    return RUN.gpt2.tokenizer.vocab_size if RUN.gpt2.tokenizer else None
