# Finished runs -> tidy rows -> tables and figures, and the names by which these are asked for.
REPORT_JOB = canonical_json(RUN.report_job())
TABLE = f"{RESULTS}/tables/{{table}}"
FIGURE = f"{FIGURES}/{{figure}}"


rule rows:
    input:
        # metrics.jsonl is read from beside each result.json; one rule wrote both.
        [
            f"{RESULTS}/pretrain/{v}/d{d}/seed{s}/result.json"
            for v, d, s in RUN.pretrain_cells()
        ],
        [
            f"{RESULTS}/fold/{v}/d{d}/seed{s}/result.json"
            for v, d, s in RUN.pretrain_cells()
            if v != "baseline"
        ],
    output:
        results=f"{RESULTS}/rows/results.csv",
        curves=f"{RESULTS}/rows/curves.csv",
    log:
        f"{LOGS}/rows.log",
    conda:
        "../../environment.yml"
    params:
        run=RUN.run,
        out=subpath(output.results, parent=True),
    shell:
        "tapernorm rows {input:q} --run {params.run:q} --out {params.out:q} &> {log:q}"


rule table:
    input:
        source_files,
    output:
        multiext(TABLE, ".csv", ".md", ".tex"),
        report(f"{TABLE}.html", caption="../report/table.rst", category="Tables"),
    log:
        f"{LOGS}/{{table}}.log",
    wildcard_constraints:
        table=r"table[123]\w*",
    conda:
        "../../environment.yml"
    params:
        job=REPORT_JOB,
        source=source_of,
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm table {wildcards.table} --job {params.job:q} {params.source:q} --out {params.out:q} &> {log:q}"


# Tables 4 and 5 are settings of the config: no run has to finish for them.
rule settings:
    output:
        multiext(TABLE, ".csv", ".md", ".tex"),
        report(f"{TABLE}.html", caption="../report/table.rst", category="Tables"),
    log:
        f"{LOGS}/{{table}}.log",
    wildcard_constraints:
        table=r"table[45]",
    conda:
        "../../environment.yml"
    params:
        job=canonical_json(RUN.settings_job()),
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm settings {wildcards.table} --job {params.job:q} --out {params.out:q} &> {log:q}"


rule figure:
    input:
        source_files,
    output:
        multiext(FIGURE, ".pdf", ".csv"),
        report(f"{FIGURE}.png", caption="../report/figure.rst", category="Figures"),
    log:
        f"{LOGS}/{{figure}}.log",
    wildcard_constraints:
        figure=r"figure(\d\w?|_decode|_finetune)",
    conda:
        "../../environment.yml"
    params:
        job=REPORT_JOB,
        source=source_of,
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm figure {wildcards.figure} --job {params.job:q} {params.source:q} --out {params.out:q} &> {log:q}"


rule claims:
    input:
        rules.rows.output,
        gpt2_rows=rules.gpt2_rows.output if RUN.gpt2 else [],
        bench=f"{RESULTS}/bench/decode.json" if RUN.benched else [],
        last_token=f"{RESULTS}/bench/last_token.json" if RUN.benched else [],
    output:
        multiext(f"{RESULTS}/claims", ".csv", ".md"),
        report(
            f"{RESULTS}/claims.html",
            caption="../report/claims.rst",
            category="Claims",
        ),
    log:
        f"{LOGS}/claims.log",
    conda:
        "../../environment.yml"
    params:
        job=canonical_json(RUN.claims_job()),
        rows=subpath(input[0], parent=True),
        measured=lambda w, input: [
            *(
                ["--gpt2-rows", str(Path(input.gpt2_rows[0]).parent)]
                if input.gpt2_rows
                else []
            ),
            *(["--bench", input.bench] if input.bench else []),
            *(["--last-token", input.last_token] if input.last_token else []),
        ],
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm claims --job {params.job:q} --rows {params.rows:q} {params.measured:q} --out {params.out:q}"
        " &> {log:q}"


rule provenance:
    input:
        rules.rows.input,
        [f"{GPT2}/base/{size}/result.json" for size in SIZES] if RUN.gpt2 else [],
        rules.gpt2_rows.input if RUN.gpt2 else [],
        [f"{RESULTS}/bench/{kind}.json" for kind in ("decode", "last_token")]
        if RUN.benched
        else [],
    output:
        f"{RESULTS}/provenance.csv",
        report(
            f"{RESULTS}/provenance.html",
            caption="../report/provenance.rst",
            category="Provenance",
        ),
    log:
        f"{LOGS}/provenance.log",
    conda:
        "../../environment.yml"
    params:
        run=RUN.run,
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm rows --provenance {input:q} --run {params.run:q} --out {params.out:q} &> {log:q}"


localrules:
    rows,
    settings,
    claims,
    provenance,
    report,
    table,
    figure,
    tables,
    figures,
    table1,
    table2,
    table3,
    figure1,
    figure1a,
    figure1b,
    figure2,
    figure_decode,
    figure_finetune,


rule table1:
    input:
        multiext(f"{RESULTS}/tables/table1", ".csv", ".md", ".tex"),


rule table2:
    input:
        expand(
            f"{RESULTS}/tables/{{table}}.{{kind}}",
            table=["table2", "table2x", "table2v1"],
            kind=["csv", "md", "tex"],
        ),


rule table3:
    input:
        expand(
            f"{RESULTS}/tables/{{table}}.{{kind}}",
            table=["table3", "table3x"],
            kind=["csv", "md", "tex"],
        ),


rule figure1a:
    input:
        multiext(f"{FIGURES}/figure1a", ".pdf", ".png", ".csv"),


rule figure1b:
    input:
        multiext(f"{FIGURES}/figure1b", ".pdf", ".png", ".csv"),


rule figure1:
    input:
        rules.figure1a.input,
        rules.figure1b.input,


rule figure2:
    input:
        multiext(f"{FIGURES}/figure2", ".pdf", ".png", ".csv"),


rule figure_decode:
    input:
        multiext(f"{FIGURES}/figure_decode", ".pdf", ".png", ".csv"),


rule figure_finetune:
    input:
        multiext(f"{FIGURES}/figure_finetune", ".pdf", ".png", ".csv"),


rule tables:
    input:
        rules.table1.input,
        rules.table2.input if RUN.benched else [],
        rules.table3.input if RUN.gpt2 else [],
        expand(
            f"{RESULTS}/tables/{{table}}.{{kind}}",
            table=["table4", "table5"] if RUN.gpt2 else ["table4"],
            kind=["csv", "md", "tex"],
        ),


rule figures:
    input:
        rules.figure1.input,
        rules.figure2.input,
        rules.figure_decode.input if RUN.benched else [],
        rules.figure_finetune.input if RUN.gpt2 else [],


# Everything that the report shows; `snakemake report --report FILE.html` then puts it into one file.
rule report:
    input:
        rules.tables.input,
        rules.figures.input,
        rules.claims.output,
        rules.provenance.output,
