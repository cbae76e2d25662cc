# One job per variant, width and seed. Only final files are declared: Snakemake deletes declared outputs before each
# start, and a killed job must find its checkpoints again. What defines the numbers is in params and triggers a rerun
# when it changes; hardware is in resources and does not. `exec`: no shell stands between the trainer and a signal.
PRETRAINED = f"{RESULTS}/pretrain/{{variant}}/d{{width}}/seed{{seed}}"


rule pretrain:
    input:
        *KERNELS,
        tokens=DATA_TOKENS,
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
        **training(lambda w: Load.of_pretraining(pretrain_job(w), RUN.hardware)),
    params:
        job=lambda w: canonical_json(pretrain_job(w)),
        made_from=lambda w, input: folders_of(input),
        out=lambda w, output: str(Path(output[0]).parent),
    shell:
        "exec tapernorm pretrain --job {params.job:q} --hardware {resources.hardware:q} --threads {threads}"
        f" {{params.made_from:q}} --out {{params.out:q}}{KERNELS_OPTION} &> {{log:q}}"
