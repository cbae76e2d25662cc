# Decoding speed. A benchmark has the machine to itself: all cores that Snakemake may use, and on a cluster, by its
# profile, the whole node, where it asks for those that it times with.
BENCH_THREADS = (
    not workflow.remote_exec and workflow.resource_settings.cores
) or RUN.bench.threads


rule bench:
    input:
        lambda w: timed_run(w.of.removeprefix("_")),
    output:
        f"{RESULTS}/bench/{{kind}}{{of}}.json",
    log:
        f"{LOGS}/bench/{{kind}}{{of}}.log",
    wildcard_constraints:
        kind="decode|last_token|rivals",
        of="(_[A-Za-z0-9]+)?",
    conda:
        "../../environment.yml"
    threads: BENCH_THREADS
    resources:
        device=RUN.hardware.device,
        gpu=GPUS,
        jobs_per_gpu=RUN.hardware.jobs_per_gpu,
    params:
        job=canonical_json(RUN.bench_job()),
        model=subpath(input[0], parent=True),
    shell:
        "tapernorm bench {wildcards.kind} --job {params.job:q} --model {params.model:q}"
        " --device {resources.device} --jobs-per-gpu {resources.jobs_per_gpu} --out {output:q} &> {log:q}"
