# The names by which tables and figures are asked for.
def tables_files(*names):
    return expand(
        f"{RESULTS}/tables/{{name}}.{{kind}}", name=names, kind=["csv", "md", "tex"]
    )


def figures_files(*names):
    return expand(
        f"{FIGURES}/{{name}}.{{kind}}", name=names, kind=["pdf", "png", "csv"]
    )


def stage_files(stage):
    """Tables and figure of a stage of the study."""
    made = [f"table_{stage}", f"table_{stage}_oddities"]
    drawn = [f"figure_{stage}"]
    return tables_files(*(t for t in made if t in TABLES)) + figures_files(
        *(f for f in drawn if f in FIGURES_OF_RUN)
    )


OF_PAPER = {
    "table1": tables_files("table1"),
    "table2": tables_files("table2", "table2x", "table2v1"),
    "table3": tables_files("table3", "table3x"),
    "figure1a": figures_files("figure1a"),
    "figure1b": figures_files("figure1b"),
    "figure1": figures_files("figure1a", "figure1b"),
    "figure2": figures_files("figure2"),
    "figure_decode": figures_files("figure_decode"),
    "figure_finetune": figures_files("figure_finetune"),
    "tables": tables_files(*(t for t in TABLES if not t.startswith("table_"))),
    "figures": figures_files(
        *(f for f in FIGURES_OF_RUN if PRODUCTS[f].job_class is catalogue.ReportJob)
    ),
}
TARGETS = dict(OF_PAPER)
TARGETS["report"] = [
    *OF_PAPER["tables"],
    *OF_PAPER["figures"],
    *rules.claims.output,
    *rules.provenance.output,
]
if RUN.study:
    TARGETS |= {f"study_{stage}": stage_files(stage) for stage in STAGES}
    TARGETS["study"] = [file for stage in STAGES for file in stage_files(stage)]
    TARGETS["study_oddities"] = tables_files(
        *(t for t in TABLES if t.endswith("_oddities"))
    )
    # The run that the study builds on: the paper's own tables, figures and claims.
    TARGETS["study_S0"] = [
        *OF_PAPER["tables"],
        *OF_PAPER["figures"],
        *rules.claims.output,
    ]
if RUN.robustness:
    TARGETS["study_S3"] = tables_files(
        *(t for t in TABLES if t.startswith("table_S3"))
    ) + figures_files("figure_S3")

for target, files in TARGETS.items():

    rule:
        name:
            target
        input:
            files,
        localrule: True
