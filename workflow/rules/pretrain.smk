# One job per variant, width and seed. Only final files are declared: Snakemake deletes declared outputs before each
# start, and a killed job must find its checkpoints again. What defines the numbers is in params and triggers a rerun
# when it changes; hardware is in resources and does not. `exec`: no shell stands between the trainer and a signal.
PRETRAINED = f"{RESULTS}/pretrain/{{variant}}/d{{width}}/seed{{seed}}"


rule pretrain:
    input:
        DATA_TOKENS,
    output:
        metrics=f"{PRETRAINED}/metrics.jsonl",
        result=f"{PRETRAINED}/result.json",
        model=f"{PRETRAINED}/model.safetensors",
        config=f"{PRETRAINED}/config.json",
    log:
        f"{LOGS}/pretrain/{{variant}}/d{{width}}/seed{{seed}}.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        hardware=canonical_json(RUN.hardware),
        gpu=TRAINING_GPUS,
        mem_mb=lambda w: memory_mb(pretrain_load(w), RUN.hardware),
        runtime=lambda w, attempt: limit_min(pretrain_load(w), RUN.hardware, attempt),
    params:
        job=lambda w: canonical_json(pretrain_job(w)),
        tokens=subpath(input[0], parent=True),
        out=subpath(output.result, parent=True),
    shell:
        "exec tapernorm pretrain --job {params.job:q} --hardware {resources.hardware:q} --threads {threads}"
        " --tokens {params.tokens:q} --out {params.out:q} &> {log:q}"
