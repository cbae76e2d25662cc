# The GPT-2 track: base models -> fine-tunes by four methods -> folds -> evaluations.
wildcard_constraints:
    text="[a-z][a-z0-9_]*",
    size="[a-z][a-z0-9_]*",
    method=one_of(METHODS),


rule filter:
    input:
        rows=lambda w: blocks_of(SCORED[RUN.gpt2.corpus(w.text).of]),
        seen=lambda w: blocks_of(RUN.gpt2.corpus(w.text).seen),
    output:
        multiext(f"{BLOCKS}/", valid="valid.bin", manifest="manifest.json"),
    log:
        f"{LOGS}/gpt2/blocks/{{text}}.log",
    wildcard_constraints:
        text=one_of(gpt2_texts("filtered")),
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json(RUN.filter_job(w.text)),
        rows=lambda w: f"{GPT2}/blocks/{SCORED[RUN.gpt2.corpus(w.text).of]}",
        seen=lambda w: f"{GPT2}/blocks/{RUN.gpt2.corpus(w.text).seen}",
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm tokens --job {params.job:q} --rows {params.rows:q} --seen {params.seen:q} --out {params.out:q}"
        " &> {log:q}"


# A base model of our own is trained on the base text; a published one is brought here once, and read from here.
rule base:
    input:
        lambda w: blocks_of("base") if SIZES[w.size].fresh else [],
    output:
        multiext(
            f"{GPT2}/base/{{size}}/",
            config="config.json",
            model="model.safetensors",
            result="result.json",
        ),
    log:
        f"{LOGS}/gpt2/base/{{size}}.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        hardware=canonical_json(RUN.hardware),
        gpu=lambda w: TRAINING_GPUS if SIZES[w.size].fresh else 0,
        mem_mb=lambda w: memory_mb(base_load(w), RUN.hardware),
        runtime=lambda w, attempt: limit_min(base_load(w), RUN.hardware, attempt),
    params:
        job=lambda w: canonical_json(RUN.base_job(w.size)),
        blocks=lambda w: (
            ["--blocks", f"{GPT2}/blocks/base"] if SIZES[w.size].fresh else []
        ),
        out=subpath(output.model, parent=True),
    shell:
        "exec tapernorm pretrain --job {params.job:q} --hardware {resources.hardware:q} --threads {threads}"
        " {params.blocks:q} --out {params.out:q} &> {log:q}"


rule published:
    output:
        multiext(
            f"{GPT2}/published/{{method}}/{{size}}/",
            config="config.json",
            model="model.safetensors",
            result="result.json",
        ),
    log:
        f"{LOGS}/gpt2/published/{{method}}/{{size}}.log",
    conda:
        "../../environment.yml"
    resources:
        hardware=canonical_json(RUN.hardware),
    params:
        job=lambda w: canonical_json(RUN.published_job(w.method, w.size)),
        out=subpath(output.model, parent=True),
    shell:
        "tapernorm pretrain --job {params.job:q} --hardware {resources.hardware:q} --out {params.out:q} &> {log:q}"


rule finetune:
    input:
        base=rules.base.output.model,
        blocks=blocks_of("train"),
    output:
        multiext(
            f"{FINETUNED}/",
            config="config.json",
            metrics="metrics.jsonl",
            model="model.safetensors",
            result="result.json",
        ),
    log:
        f"{LOGS}/finetune/{{method}}/{{size}}/seed{{seed}}.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        hardware=lambda w: canonical_json(RUN.finetune_hardware(w.size)),
        gpu=lambda w: GPUS * SIZES[w.size].devices_per_job,
        mem_mb=lambda w: memory_mb(finetune_load(w), RUN.finetune_hardware(w.size)),
        runtime=lambda w, attempt: limit_min(
            finetune_load(w), RUN.finetune_hardware(w.size), attempt
        ),
    params:
        job=lambda w: canonical_json(RUN.finetune_job(w.method, w.size, int(w.seed))),
        base=subpath(input.base, parent=True),
        blocks=lambda w, input: str(Path(input.blocks[0]).parent),
        out=subpath(output.model, parent=True),
    shell:
        "exec tapernorm finetune --job {params.job:q} --hardware {resources.hardware:q} --threads {threads}"
        " --base {params.base:q} --blocks {params.blocks:q} --out {params.out:q} &> {log:q}"


rule finetune_fold:
    input:
        rules.finetune.output,
    output:
        config=f"{FINETUNE_FOLD}/fused/config.json",
        model=f"{FINETUNE_FOLD}/fused/model.safetensors",
        result=f"{FINETUNE_FOLD}/result.json",
    log:
        f"{LOGS}/finetune_fold/{{method}}/{{size}}/seed{{seed}}.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        device=RUN.hardware.device,
        gpu=GPUS,
        jobs_per_gpu=RUN.hardware.jobs_per_gpu,
    params:
        model=subpath(input[0], parent=True),
        out=subpath(output.result, parent=True),
    shell:
        "tapernorm fold --model {params.model:q} --forms fused --out {params.out:q} --device {resources.device}"
        " --jobs-per-gpu {resources.jobs_per_gpu} --threads {threads} &> {log:q}"


# One job scores a model, and its folded form, on every corpus.
rule evaluate:
    input:
        model=rules.finetune.output.model,
        folded=folded_form,
        tokenizer=GPT2_TOKENIZER,
        blocks=[blocks_of(text) for text in SCORED.values()],
    output:
        f"{RESULTS}/evaluate/{{method}}/{{size}}/seed{{seed}}.json",
    log:
        f"{LOGS}/evaluate/{{method}}/{{size}}/seed{{seed}}.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        device=RUN.hardware.device,
        gpu=GPUS,
        jobs_per_gpu=RUN.hardware.jobs_per_gpu,
        batch=lambda w: 2 * SIZES[w.size].micro_batch,
    params:
        job=lambda w: canonical_json(RUN.evaluate_job(w.method, w.size, int(w.seed))),
        model=subpath(input.model, parent=True),
        folded=lambda w, input: (
            ["--folded", str(Path(input.folded[0]).parent)] if input.folded else []
        ),
        tokenizer=subpath(input.tokenizer, parent=True),
        blocks=[f"{name}={GPT2}/blocks/{text}" for name, text in SCORED.items()],
    shell:
        "tapernorm evaluate --job {params.job:q} --model {params.model:q} {params.folded:q}"
        " --blocks {params.blocks:q} --tokenizer {params.tokenizer:q} --batch {resources.batch}"
        " --device {resources.device} --jobs-per-gpu {resources.jobs_per_gpu} --threads {threads} --out {output:q}"
        " &> {log:q}"


use rule evaluate as evaluate_base with:
    input:
        model=lambda w: f"{model_as_it_is(w)}/model.safetensors",
        folded=[],
        tokenizer=GPT2_TOKENIZER,
        blocks=[blocks_of(text) for text in SCORED.values()],
    output:
        f"{RESULTS}/evaluate/{{method}}/{{size}}.json",
    log:
        f"{LOGS}/evaluate/{{method}}/{{size}}.log",
    wildcard_constraints:
        method="original|published_.+",
    params:
        job=lambda w: canonical_json(RUN.evaluate_job(w.method, w.size, None)),
        model=subpath(input.model, parent=True),
        folded=[],
        tokenizer=subpath(input.tokenizer, parent=True),
        blocks=[f"{name}={GPT2}/blocks/{text}" for name, text in SCORED.items()],
