# One job per variant, width and seed. Only final files are declared: Snakemake deletes declared outputs before each
# start, and a killed job must find its checkpoints again. What defines the numbers is in params and triggers a rerun
# when it changes; hardware is in resources and does not.
PRETRAINED = RESULTS + "/pretrain/{variant}/d{width}/seed{seed}"


rule pretrain:
    input:
        rules.tokens.output,
    output:
        metrics=f"{PRETRAINED}/metrics.jsonl",
        result=f"{PRETRAINED}/result.json",
        model=f"{PRETRAINED}/model.safetensors",
        config=f"{PRETRAINED}/config.json",
    log:
        LOGS + "/pretrain/{variant}/d{width}/seed{seed}.log",
    threads: RUN.hardware.threads
    resources:
        hardware=canonical_json(RUN.hardware),
    params:
        job=lambda w: canonical_json(
            RUN.pretrain_job(w.variant, int(w.width), int(w.seed))
        ),
        tokens=subpath(input[0], parent=True),
        out=subpath(output.result, parent=True),
    shell:
        "tapernorm pretrain --job {params.job:q} --hardware {resources.hardware:q} --threads {threads}"
        " --tokens {params.tokens:q} --out {params.out:q} &> {log:q}"
