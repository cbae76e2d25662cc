# Beyond the paper: the arms of the study, stage by stage. An arm whose job is a pre-training's, or an earlier arm's, is
# that very run (study_cells.homes). Training declares only the result: a run that diverged has one and no weights.
wildcard_constraints:
    stage="|".join(STAGES),
    arm="[a-z][a-z0-9_]*",


rule arm:
    input:
        DATA_TOKENS,
    output:
        f"{RESULTS}/study/{{stage}}/{{arm}}/seed{{seed}}/result.json",
    log:
        f"{LOGS}/study/{{stage}}/{{arm}}/seed{{seed}}.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        hardware=canonical_json(RUN.hardware),
        gpu=TRAINING_GPUS,
        mem_mb=lambda w: memory_mb(arm_load(w), RUN.hardware),
        runtime=lambda w, attempt: limit_min(arm_load(w), RUN.hardware, attempt),
    params:
        job=lambda w: canonical_json(arm_job(w)),
        tokens=subpath(input[0], parent=True),
        out=subpath(output[0], parent=True),
    shell:
        "exec tapernorm pretrain --job {params.job:q} --hardware {resources.hardware:q} --threads {threads}"
        " --tokens {params.tokens:q} --out {params.out:q} &> {log:q}"


# What the arms of a stage with rivals leave to run, and odd inputs.
rule oddities_rows:
    input:
        DATA_TOKENS,
        lambda w: stage_results(w.stage),
    output:
        ODDITIES_ROWS,
    log:
        f"{LOGS}/study/{{stage}}/oddities.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        device=RUN.hardware.device,
        gpu=GPUS,
        jobs_per_gpu=RUN.hardware.jobs_per_gpu,
    params:
        job=lambda w: canonical_json(stage_job(RUN, w.stage)),
        tokens=subpath(input[0], parent=True),
        results=RESULTS,
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm rows study_{wildcards.stage}_oddities --job {params.job:q} --results {params.results:q}"
        " --tokens {params.tokens:q} --device {resources.device} --jobs-per-gpu {resources.jobs_per_gpu}"
        " --threads {threads} --out {params.out:q} &> {log:q}"
