# Decoding speed. A benchmark has the machine to itself: all cores, and under SLURM the whole node.
VARIANT, WIDTH, SEED = RUN.benched


rule bench:
    input:
        model=f"{RESULTS}/pretrain/{VARIANT}/d{WIDTH}/seed{SEED}/model.safetensors",
        trained=f"{RESULTS}/pretrain/{VARIANT}/d{WIDTH}/seed{SEED}/result.json",
    output:
        f"{RESULTS}/bench/{{kind}}.json",
    log:
        f"{LOGS}/bench/{{kind}}.log",
    wildcard_constraints:
        kind="decode|last_token",
    threads: workflow.cores
    resources:
        device=RUN.hardware.device,
        slurm_extra="--exclusive",
    params:
        job=canonical_json(RUN.bench_job()),
        model=subpath(input.model, parent=True),
    shell:
        "tapernorm bench {wildcards.kind} --job {params.job:q} --model {params.model:q}"
        " --device {resources.device} --out {output:q} &> {log:q}"
