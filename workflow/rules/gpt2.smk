# The GPT-2 track: base models -> fine-tunes by four methods -> folds -> evaluations.
GPT2 = f"{RESULTS}/gpt2"
TUNED = "{method}/{size}/seed{seed}"


wildcard_constraints:
    text="[a-z][a-z0-9_]*",
    size="[a-z][a-z0-9_]*",
    method=one_of(METHODS),


rule filter:
    input:
        rows=lambda w: blocks_of(GPT2_CORPORA[RUN.gpt2.corpus(w.text).of]),
        seen=lambda w: blocks_of(RUN.gpt2.corpus(w.text).seen),
    output:
        multiext(f"{GPT2}/blocks/{{text}}/", valid="valid.bin", manifest="manifest.json"),
    log:
        f"{LOGS}/gpt2/blocks/{{text}}.log",
    wildcard_constraints:
        text=one_of(gpt2_texts("filtered")),
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json(RUN.filter_job(w.text)),
        rows=lambda w: f"{GPT2}/blocks/{GPT2_CORPORA[RUN.gpt2.corpus(w.text).of]}",
        seen=lambda w: f"{GPT2}/blocks/{RUN.gpt2.corpus(w.text).seen}",
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm tokens --job {params.job:q} --rows {params.rows:q} --seen {params.seen:q} --out {params.out:q}"
        " &> {log:q}"


# A fresh base model is trained on the base text; a published one is downloaded once, and read from its copy here.
use rule pretrain as base with:
    input:
        *KERNELS,
        lambda w: blocks_of("base") if SIZES[w.size].fresh else [],
    output:
        multiext(f"{GPT2}/base/{{size}}/", config="config.json", model="model.safetensors", result="result.json"),
    log:
        f"{LOGS}/gpt2/base/{{size}}.log",
    resources:
        **training(
            lambda w: Load.of_base(RUN.base_job(w.size), own_vocabulary(), RUN.hardware),
            gpu=lambda w: TRAINING_GPUS if SIZES[w.size].fresh else 0,
        ),
    params:
        job=lambda w: canonical_json(RUN.base_job(w.size)),
        made_from=lambda w: ["--blocks", f"{GPT2}/blocks/base"] if SIZES[w.size].fresh else [],


use rule pretrain as published with:
    input:
        KERNELS,  # of a published model, only for the command to be the same
    output:
        multiext(
            f"{GPT2}/published/{{method}}/{{size}}/",
            config="config.json",
            model="model.safetensors",
            result="result.json",
        ),
    log:
        f"{LOGS}/gpt2/published/{{method}}/{{size}}.log",
    threads: 1
    resources:
        hardware=canonical_json(RUN.hardware),
    params:
        job=lambda w: canonical_json(RUN.published_job(w.method, w.size)),


rule finetune:
    input:
        *KERNELS,
        base=rules.base.output.model,
        blocks=blocks_of("train"),
    output:
        multiext(
            f"{RESULTS}/finetune/{TUNED}/",
            config="config.json",
            metrics="metrics.jsonl",
            model="model.safetensors",
            result="result.json",
        ),
    log:
        f"{LOGS}/finetune/{TUNED}.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        **training(
            finetune_load,
            hardware=lambda w: RUN.finetune_hardware(w.size),
            gpu=lambda w: GPUS * SIZES[w.size].devices_per_job,
        ),
    params:
        job=lambda w: canonical_json(RUN.finetune_job(w.method, w.size, int(w.seed))),
        made_from=lambda w, input: folders_of(input),
        out=subpath(output.model, parent=True),
    shell:
        "exec tapernorm finetune --job {params.job:q} --hardware {resources.hardware:q} --threads {threads}"
        f" {{params.made_from:q}} --out {{params.out:q}}{KERNELS_OPTION} &> {{log:q}}"


rule finetune_fold:
    input:
        rules.finetune.output,
    output:
        multiext(f"{RESULTS}/finetune_fold/{TUNED}/fused/", "config.json", "model.safetensors"),
        result=f"{RESULTS}/finetune_fold/{TUNED}/result.json",
    log:
        f"{LOGS}/finetune_fold/{TUNED}.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        **ON_DEVICE,
    params:
        model=subpath(input[0], parent=True),
        out=subpath(output.result, parent=True),
    shell:
        "tapernorm fold --model {params.model:q} --forms fused --out {params.out:q}"
        f" {DEVICE_OPTIONS} --threads {{threads}} &> {{log:q}}"


# One job scores a model, and its folded form if its norms can be folded, on every corpus.
rule evaluate:
    input:
        model=rules.finetune.output.model,
        folded=lambda w: [] if w.method == "vanilla" else expand(rules.finetune_fold.output[:2], **w),
        tokenizer=f"{GPT2}/tokenizer/manifest.json",
        blocks=[blocks_of(text) for text in GPT2_CORPORA.values()],
    output:
        f"{RESULTS}/evaluate/{TUNED}.json",
    log:
        f"{LOGS}/evaluate/{TUNED}.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        **ON_DEVICE,
        batch=lambda w: 2 * SIZES[w.size].micro_batch,
    params:
        job=lambda w: canonical_json(RUN.evaluate_job(w.method, w.size, int(w.seed))),
        model=subpath(input.model, parent=True),
        folded=lambda w, input: ["--folded", str(Path(input.folded[0]).parent)] if input.folded else [],
        tokenizer=subpath(input.tokenizer, parent=True),
        blocks=[f"{name}={GPT2}/blocks/{text}" for name, text in GPT2_CORPORA.items()],
    shell:
        "tapernorm evaluate --job {params.job:q} --model {params.model:q} {params.folded:q}"
        " --blocks {params.blocks:q} --tokenizer {params.tokenizer:q} --batch {resources.batch}"
        f" {DEVICE_OPTIONS} --threads {{threads}} --out {{output:q}} &> {{log:q}}"


use rule evaluate as evaluate_base with:
    input:
        model=scored_as_it_is,
        folded=[],
        tokenizer=f"{GPT2}/tokenizer/manifest.json",
        blocks=[blocks_of(text) for text in GPT2_CORPORA.values()],
    output:
        f"{RESULTS}/evaluate/{{method}}/{{size}}.json",
    log:
        f"{LOGS}/evaluate/{{method}}/{{size}}.log",
    wildcard_constraints:
        method="original|published_.+",
    params:
        job=lambda w: canonical_json(RUN.evaluate_job(w.method, w.size, None)),
        folded=[],
