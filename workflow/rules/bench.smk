# Decoding speed. A benchmark runs alone: it takes all cores that Snakemake may use. On a cluster the profile reserves
# the whole node, and the job asks for the cores that it times with.
TIMING_THREADS = (not workflow.remote_exec and workflow.resource_settings.cores) or RUN.bench.threads


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
    threads: TIMING_THREADS
    resources:
        **ON_DEVICE,
    params:
        job=canonical_json(RUN.bench_job()),
        model=subpath(input[0], parent=True),
    shell:
        "tapernorm bench {wildcards.kind} --job {params.job:q} --model {params.model:q}"
        f" {DEVICE_OPTIONS} --out {{output:q}} &> {{log:q}}"


# Where hardware.linear is auto, the kernel of all trainings of the run. It is chosen once: nothing reruns it.
rule kernels:
    output:
        f"{RESULTS}/kernels.json",
    log:
        f"{LOGS}/kernels.log",
    conda:
        "../../environment.yml"
    threads: TIMING_THREADS
    resources:
        **ON_DEVICE,
        job=canonical_json(linear_job(RUN)),
    params:
        threads=RUN.hardware.threads,
    shell:
        f"tapernorm bench linear --job {{resources.job:q}} {DEVICE_OPTIONS} --threads {{params.threads}}"
        " --out {output:q} &> {log:q}"
