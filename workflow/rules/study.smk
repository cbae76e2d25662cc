# Beyond the paper: the arms of the study, stage by stage. An arm whose job is a pre-training's, or an earlier arm's, is
# that very run (study_cells.homes). Training declares only the result: a run that diverged has one and no weights.
wildcard_constraints:
    stage="|".join(STAGES),
    arm="[a-z][a-z0-9_]*",


rule arm:
    input:
        rules.tokens.output,
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
        "exec tapernorm arm --job {params.job:q} --hardware {resources.hardware:q} --threads {threads}"
        " --tokens {params.tokens:q} --out {params.out:q} &> {log:q}"


rule stage_rows:
    input:
        lambda w: stage_results(w.stage),
    output:
        STAGE_ROWS,
    log:
        f"{LOGS}/study/{{stage}}/rows.log",
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json(stage_job(RUN, w.stage)),
        results=subpath(output[0], ancestor=2),
    shell:
        "tapernorm stage rows --job {params.job:q} --results {params.results:q} --out {output:q} &> {log:q}"


rule stage_table:
    input:
        STAGE_ROWS,
    output:
        multiext(STAGE_TABLE, ".csv", ".md", ".tex"),
        report(f"{STAGE_TABLE}.html", caption="../report/stage.rst", category="Study"),
    log:
        f"{LOGS}/study/{{stage}}/table.log",
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json(stage_job(RUN, w.stage)),
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm stage table --job {params.job:q} --rows {input:q} --out {params.out:q} &> {log:q}"


rule stage_figure:
    input:
        STAGE_ROWS,
    output:
        multiext(STAGE_FIGURE, ".pdf", ".csv"),
        report(f"{STAGE_FIGURE}.png", caption="../report/stage.rst", category="Study"),
    log:
        f"{LOGS}/study/{{stage}}/figure.log",
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json(stage_job(RUN, w.stage)),
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm stage figure --job {params.job:q} --rows {input:q} --out {params.out:q} &> {log:q}"


localrules:
    stage_rows,
    stage_table,
    stage_figure,
    study,


# study_S0 is the run that the study builds on: the paper's own tables, figures and claims.
rule study_S0:
    input:
        rules.tables.input,
        rules.figures.input,
        rules.claims.output,
    localrule: True


for stage in STAGES:

    rule:
        name:
            f"study_{stage}"
        input:
            stage_files(stage),
            oddities_files(stage) if stage in WITH_RIVALS else [],
        localrule: True


rule study:
    input:
        [stage_files(stage) for stage in STAGES],
        [oddities_files(stage) for stage in WITH_RIVALS],
