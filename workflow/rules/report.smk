# Finished runs -> tidy rows -> tables and figures.
for name, (results, files, words) in ROWS.items():

    # The command reads metrics.jsonl beside each result.json; one rule wrote both. The variables of the loop are passed in
    # params, because they have their last values when the shell command runs.
    rule:
        name:
            f"rows_{name}"
        input:
            results,
        output:
            files,
        log:
            f"{LOGS}/rows/{name}.log",
        localrule: True
        conda:
            "../../environment.yml"
        params:
            name=name,
            words=words,
            out=subpath(output[0], parent=True),
        shell:
            "tapernorm rows {params.name} {params.words:q} --out {params.out:q} &> {log:q}"


rule table:
    input:
        product_rows,
    output:
        multiext(f"{RESULTS}/tables/{{name}}", ".csv", ".md", ".tex"),
        report(
            f"{RESULTS}/tables/{{name}}.html",
            caption="../report/table.rst",
            category=category_of("Tables"),
        ),
    log:
        f"{LOGS}/tables/{{name}}.log",
    wildcard_constraints:
        name=one_of(TABLES),
    localrule: True
    conda:
        "../../environment.yml"
    params:
        job=product_job,
        out=subpath(output[0], parent=True),
    shell:
        f"tapernorm table {{wildcards.name}} --job {{params.job:q}} --results {RESULTS} --out {{params.out:q}} &> {{log:q}}"


rule figure:
    input:
        product_rows,
    output:
        multiext(f"{FIGURES}/{{name}}", ".pdf", ".png", ".csv", ".md", ".tex"),
        report(
            f"{FIGURES}/{{name}}.html",
            caption="../report/figure.rst",
            category=category_of("Figures"),
        ),
    log:
        f"{LOGS}/figures/{{name}}.log",
    wildcard_constraints:
        name=one_of(FIGURES_OF_RUN),
    localrule: True
    conda:
        "../../environment.yml"
    params:
        job=product_job,
        out=subpath(output[0], parent=True),
    shell:
        f"tapernorm figure {{wildcards.name}} --job {{params.job:q}} --results {RESULTS} --out {{params.out:q}} &> {{log:q}}"


rule claims:
    input:
        [f"{RESULTS}/{file}" for file in PRODUCTS["claims"].needs],
    output:
        multiext(f"{RESULTS}/claims", ".csv", ".md", ".tex"),
        report(f"{RESULTS}/claims.html", caption="../report/claims.rst", category="Claims"),
    log:
        f"{LOGS}/claims.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        job=canonical_json(RUN.claims_job()),
    shell:
        f"tapernorm table claims --job {{params.job:q}} --results {RESULTS} --out {RESULTS} &> {{log:q}}"


rule provenance:
    input:
        TRAINED,
        [f"{RESULTS}/gpt2/base/{size}/result.json" for size in SIZES],
        GPT2_SCORES,
        [files_of_source(name) for name in BENCHED],
    output:
        f"{RESULTS}/provenance.csv",
        report(f"{RESULTS}/provenance.html", caption="../report/provenance.rst", category="Provenance"),
    log:
        f"{LOGS}/provenance.log",
    localrule: True
    conda:
        "../../environment.yml"
    params:
        run=RUN.run,
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm rows provenance {input:q} --run {params.run:q} --out {params.out:q} &> {log:q}"
