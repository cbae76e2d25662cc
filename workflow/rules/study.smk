# Beyond the paper: the arms of the study, stage by stage. An arm whose job equals a pre-training's, or an earlier arm's,
# shares that run (HOMES). Training declares only the result, because a run that diverged has no weights.
wildcard_constraints:
    stage=one_of(stage.name for stage in RUN.study),
    arm="[a-z][a-z0-9_]*",


use rule pretrain as arm with:
    output:
        f"{RESULTS}/study/{{stage}}/{{arm}}/seed{{seed}}/result.json",
    log:
        f"{LOGS}/study/{{stage}}/{{arm}}/seed{{seed}}.log",
    resources:
        **training(lambda w: Load.of_pretraining(arm_job(w).pretrain, RUN.hardware)),
    params:
        job=lambda w: canonical_json(arm_job(w)),


# The operations of a stage's arms that replace norms, and their behaviour on odd inputs (Table S2).
rule oddities_rows:
    input:
        DATA_TOKENS,
        lambda w: stage_results(w.stage),
    output:
        f"{RESULTS}/{catalogue.SOURCES['oddities'].files[0]}",
    log:
        f"{LOGS}/study/{{stage}}/oddities.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        **ON_DEVICE,
    params:
        job=lambda w: canonical_json(stage_job(RUN, w.stage)),
        tokens=subpath(input[0], parent=True),
        results=RESULTS,
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm rows study_{wildcards.stage}_oddities --job {params.job:q} --results {params.results:q}"
        f" --tokens {{params.tokens:q}} {DEVICE_OPTIONS} --threads {{threads}} --out {{params.out:q}} &> {{log:q}}"
