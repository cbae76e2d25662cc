# Beyond the paper: what the arms of a stage with rivals leave to run, how fast that decodes, and odd inputs.
def tapered_run(wildcards):
    """A tapered model of the stage's width among the run's own, whose norms make way for the arms that are timed."""
    width = RUN.stage(wildcards.stage).d_model
    cells = [
        cell
        for cell in RUN.pretrain_cells()
        if cell[0] != "baseline" and cell[1] == width
    ]
    if not cells:
        raise WorkflowError(
            f"the decoding benchmark of stage {wildcards.stage} needs a tapered model of width {width}"
        )
    variant, width, seed = cells[0]
    return multiext(
        f"{RESULTS}/pretrain/{variant}/d{width}/seed{seed}/",
        "model.safetensors",
        "result.json",
    )


rule bench_rivals:
    input:
        tapered_run,
    output:
        RIVAL_BENCH,
    log:
        f"{LOGS}/bench/rivals_{{stage}}.log",
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
        "tapernorm bench rivals --job {params.job:q} --model {params.model:q}"
        " --device {resources.device} --jobs-per-gpu {resources.jobs_per_gpu} --out {output:q} &> {log:q}"


rule oddities_rows:
    input:
        rules.tokens.output,
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
    shell:
        "tapernorm oddities rows --job {params.job:q} --results {params.results:q} --tokens {params.tokens:q}"
        " --device {resources.device} --jobs-per-gpu {resources.jobs_per_gpu} --threads {threads}"
        " --out {output:q} &> {log:q}"


rule oddities_table:
    input:
        rows=ODDITIES_ROWS,
        bench=RIVAL_BENCH,
    output:
        multiext(ODDITIES_TABLE, ".csv", ".md", ".tex"),
        report(
            f"{ODDITIES_TABLE}.html",
            caption="../report/stage.rst",
            category="Study",
        ),
    log:
        f"{LOGS}/study/{{stage}}/oddities_table.log",
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json(stage_job(RUN, w.stage)),
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm oddities table --job {params.job:q} --rows {input.rows:q} --bench {input.bench:q}"
        " --out {params.out:q} &> {log:q}"


localrules:
    oddities_table,
    study_oddities,


# The second half of Table S2 alone; its stage makes it too.
rule study_oddities:
    input:
        [oddities_files(stage) for stage in WITH_RIVALS],
