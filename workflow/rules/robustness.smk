# Table S3, beyond the paper: finished models on odd inputs. One job takes all variants of a width and seed, so that each
# row's losses stand beside its Baseline's.
rule odd_corpus:
    input:
        lambda w: find_files(
            file for data in ODD.text(w.text).data for file in data.files
        ),
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
        lambda w: [
            f"{folder}/model.safetensors" for folder in finished_models(w).values()
        ],
        tokens=rules.tokens.output.manifest,
        tokenizer=rules.tokenizer.output.manifest,
        texts=expand(rules.odd_rows.output.manifest, text=ODD_TEXTS),
    output:
        f"{RESULTS}/robustness/d{{width}}/seed{{seed}}.json",
    log:
        f"{LOGS}/robustness/d{{width}}/seed{{seed}}.log",
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
            f"{name}={folder}" for name, folder in finished_models(w).items()
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
        S3_SCORES,
    output:
        S3_ROWS,
    log:
        f"{LOGS}/robustness/rows.log",
    conda:
        "../../environment.yml"
    params:
        job=REPORT_JOB,
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm trials rows {input:q} --job {params.job:q} --out {params.out:q} &> {log:q}"


rule robustness_table:
    input:
        S3_ROWS,
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
        job=REPORT_JOB,
        rows=subpath(input[0], parent=True),
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm trials table --rows {params.rows:q} --job {params.job:q} --out {params.out:q} &> {log:q}"


rule robustness_figure:
    input:
        S3_ROWS,
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
        job=REPORT_JOB,
        rows=subpath(input[0], parent=True),
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm trials figure --rows {params.rows:q} --job {params.job:q} --out {params.out:q} &> {log:q}"


localrules:
    robustness_rows,
    robustness_table,
    robustness_figure,
    study_S3,
    study_S3_files,


# The scores too: Snakemake takes rows that came with a clone for made, whatever they were made from is missing.
rule study_S3:
    input:
        S3_SCORES,
        S3_FILES,


# Tables and figure from the rows that are there: no model has to be.
rule study_S3_files:
    input:
        S3_FILES,
