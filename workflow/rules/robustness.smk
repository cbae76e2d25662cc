# Table S3, beyond the paper: finished models on odd inputs. One job takes all variants of a width and seed, or all arms
# of a stage and seed, so that each row's losses stand beside its Baseline's.
wildcard_constraints:
    place="|".join(ODD_PLACES),
    trials="|".join(STAGE_OF),


rule odd_corpus:
    input:
        lambda w: own_files(ODD.corpus_job(w.text)),
    output:
        f"{RESULTS}/robustness/texts/{{text}}/corpus/valid.jsonl",
        manifest=f"{RESULTS}/robustness/texts/{{text}}/corpus/manifest.json",
    log:
        f"{LOGS}/robustness/{{text}}/corpus.log",
    wildcard_constraints:
        text="|".join(ODD_TEXTS) or "(?!)",
    conda:
        "../../environment.yml"
    params:
        job=lambda w: canonical_json(ODD.corpus_job(w.text)),
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm corpus --job {params.job:q} --out {params.out:q} &> {log:q}"


rule odd_rows:
    input:
        corpus=rules.odd_corpus.output.manifest,
        tokenizer=rules.tokenizer.output.manifest,
    output:
        f"{RESULTS}/robustness/texts/{{text}}/rows/valid.bin",
        manifest=f"{RESULTS}/robustness/texts/{{text}}/rows/manifest.json",
    log:
        f"{LOGS}/robustness/{{text}}/rows.log",
    conda:
        "../../environment.yml"
    params:
        job=canonical_json(ODD.blocks_job(RUN.model.context)),
        corpus=subpath(input.corpus, parent=True),
        tokenizer=subpath(input.tokenizer, parent=True),
        out=subpath(output.manifest, parent=True),
    shell:
        "tapernorm blocks --job {params.job:q} --corpus {params.corpus:q} --tokenizer {params.tokenizer:q}"
        " --out {params.out:q} &> {log:q}"


rule robustness:
    input:
        tried_files,
        tokens=rules.tokens.output.manifest,
        tokenizer=rules.tokenizer.output.manifest,
        texts=expand(rules.odd_rows.output.manifest, text=ODD_TEXTS),
    output:
        ODD_SCORES,
    log:
        f"{LOGS}/robustness/{{place}}/seed{{seed}}.log",
    conda:
        "../../environment.yml"
    threads: RUN.hardware.threads
    resources:
        device=RUN.hardware.device,
        gpu=GPUS,
        jobs_per_gpu=RUN.hardware.jobs_per_gpu,
    params:
        job=lambda w: canonical_json(robustness_job(w)),
        models=lambda w: [
            f"{name}={folder}" for name, folder in tried_models(w).items()
        ],
        tokens=subpath(input.tokens, parent=True),
        tokenizer=subpath(input.tokenizer, parent=True),
        texts=[f"{text}={RESULTS}/robustness/texts/{text}/rows" for text in ODD_TEXTS],
    shell:
        "tapernorm robustness --job {params.job:q} --models {params.models:q} --tokens {params.tokens:q}"
        " --tokenizer {params.tokenizer:q} --texts {params.texts:q} --device {resources.device}"
        " --jobs-per-gpu {resources.jobs_per_gpu} --threads {threads} --out {output:q} &> {log:q}"


rule robustness_rows:
    input:
        lambda w: odd_scores(STAGE_OF[w.trials]),
    output:
        ODD_ROWS,
    log:
        f"{LOGS}/robustness/{{trials}}_rows.log",
    conda:
        "../../environment.yml"
    params:
        job=lambda w: trials_job(STAGE_OF[w.trials]),
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm trials rows {input:q} --job {params.job:q} --out {params.out:q} &> {log:q}"


rule robustness_table:
    input:
        trials_rows(None),
    output:
        expand(
            f"{RESULTS}/tables/{{table}}.{{kind}}",
            table=S3_TABLES,
            kind=["csv", "md", "tex"],
        ),
        report(
            expand(f"{RESULTS}/tables/{{table}}.html", table=S3_TABLES),
            caption="../report/robustness.rst",
            category="Study",
        ),
    log:
        f"{LOGS}/robustness/table.log",
    conda:
        "../../environment.yml"
    params:
        job=trials_job(None),
        rows=subpath(input[0], parent=True),
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm trials table --rows {params.rows:q} --job {params.job:q} --out {params.out:q} &> {log:q}"


rule robustness_figure:
    input:
        trials_rows(None),
    output:
        multiext(f"{FIGURES}/figure_S3", ".pdf", ".csv"),
        report(
            f"{FIGURES}/figure_S3.png",
            caption="../report/robustness.rst",
            category="Study",
        ),
    log:
        f"{LOGS}/robustness/figure.log",
    conda:
        "../../environment.yml"
    params:
        job=trials_job(None),
        rows=subpath(input[0], parent=True),
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm trials figure --rows {params.rows:q} --job {params.job:q} --out {params.out:q} &> {log:q}"


rule arms_table:
    input:
        [path.format(trials="S3_{stage}") for path in ODD_ROWS],
    output:
        multiext(ARMS_TABLE, ".csv", ".md", ".tex"),
        report(
            f"{ARMS_TABLE}.html", caption="../report/robustness.rst", category="Study"
        ),
    log:
        f"{LOGS}/robustness/{{stage}}_table.log",
    conda:
        "../../environment.yml"
    params:
        job=lambda w: trials_job(w.stage),
        rows=subpath(input[0], parent=True),
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm trials table --rows {params.rows:q} --job {params.job:q} --out {params.out:q} &> {log:q}"


localrules:
    robustness_rows,
    robustness_table,
    robustness_figure,
    arms_table,
    study_S3,


rule study_S3:
    input:
        S3_FILES,
        [arms_files(stage) for stage in ODD.stages],
