# Finished runs -> tidy rows -> tables and figures, and the names by which these are asked for.
REPORT_JOB = canonical_json(RUN.report_job())
TABLE = RESULTS + "/tables/{table}"
FIGURE = FIGURES + "/{figure}"


rule rows:
    input:
        # metrics.jsonl is read from beside each result.json; the rule that wrote one wrote both.
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
    params:
        run=RUN.run,
        out=subpath(output.results, parent=True),
    shell:
        "tapernorm rows {input:q} --run {params.run:q} --out {params.out:q} &> {log:q}"


def source_of(wildcards):
    """The option and file that a table or figure is made from: training rows, or the samples of a benchmark."""
    name = wildcards.get("table") or wildcards.get("figure")
    if name == "table2v1":
        return "--bench", f"{RESULTS}/bench/last_token.json"
    if name in ("table2", "table2x", "figure_decode"):
        return "--bench", f"{RESULTS}/bench/decode.json"
    return "--rows", f"{RESULTS}/rows"


def source_files(wildcards):
    option, path = source_of(wildcards)
    return rules.rows.output if option == "--rows" else path


rule table:
    input:
        source_files,
    output:
        multiext(TABLE, ".csv", ".md", ".tex"),
    log:
        LOGS + "/{table}.log",
    wildcard_constraints:
        table=r"table\w+",
    params:
        job=REPORT_JOB,
        source=source_of,
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm table {wildcards.table} --job {params.job:q} {params.source:q} --out {params.out:q} &> {log:q}"


rule figure:
    input:
        source_files,
    output:
        multiext(FIGURE, ".pdf", ".png", ".csv"),
    log:
        LOGS + "/{figure}.log",
    wildcard_constraints:
        figure=r"figure\w+",
    params:
        job=REPORT_JOB,
        source=source_of,
        out=subpath(output[0], parent=True),
    shell:
        "tapernorm figure {wildcards.figure} --job {params.job:q} {params.source:q} --out {params.out:q} &> {log:q}"


localrules:
    tables,
    figures,
    table1,
    table2,
    figure1,
    figure1a,
    figure1b,
    figure2,
    figure_decode,


rule table1:
    input:
        multiext(f"{RESULTS}/tables/table1", ".csv", ".md", ".tex"),


rule table2:
    input:
        expand(
            RESULTS + "/tables/{table}.{kind}",
            table=["table2", "table2x", "table2v1"],
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


rule tables:
    input:
        rules.table1.input,
        rules.table2.input if RUN.benched else [],


rule figures:
    input:
        rules.figure1.input,
        rules.figure2.input,
        rules.figure_decode.input if RUN.benched else [],
