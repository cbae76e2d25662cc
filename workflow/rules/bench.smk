# Decoding speed. A benchmark has the machine to itself: all cores, and under SLURM the whole node.
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


rule bench:
    input:
        benched_run,
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
        model=subpath(input[0], parent=True),
    shell:
        "tapernorm bench {wildcards.kind} --job {params.job:q} --model {params.model:q}"
        " --device {resources.device} --out {output:q} &> {log:q}"
